/* bench_device.c - what kernels.cu reaches on this GPU, beside what others reach in the same run

   Every convolution of ResNet-50 in each direction, against cuBLAS's matrix product of the same
   size and cuDNN's convolution; batch norm, softmax and update, against a copy in memory; whole
   training steps of ResNet-50 at the largest batch that fits. `make device-check` runs it. */
#define MPTRAIN_IMPLEMENTATION
#include "mptrain.h"

#include "bench_vendor.h"
#include "resnet50.h"

typedef struct bench {
    measure m;
    mpt_ctx *ctx;
    const mpt_backend *ops;
    void *self;     /* of the backend */
    FILE *json;     /* NULL: none */
    int batch_size; /* of convolutions */
    double copy_bytes_per_second;
} bench;

/* ---- JSON ------------------------------------------------------------------------------------ */
/* 0 stands for "not measured" and becomes null. */
static void json_number(bench *b, const char *name, double x, const char *end) {
    if (!b->json) return;
    fprintf(b->json, "\"%s\": ", name);
    if (x > 0) fprintf(b->json, "%.6g%s", x, end);
    else fprintf(b->json, "null%s", end);
}

static void json_text(bench *b, const char *text) {
    if (b->json) fputs(text, b->json);
}

/* ---- convolutions ---------------------------------------------------------------------------- */
enum { FPROP, DGRAD, WGRAD };
static const char *const directions[] = {"fprop", "dgrad", "wgrad"};

typedef struct convs { /* memory that all convolutions share, as large as the largest needs */
    bench *b;
    void *x, *w, *y, *matrix; /* FP16 inputs; matrix: x as cuBLAS would need it */
    void *out, *workspace;    /* out: not read again, or numbers would grow from call to call */
    float *dw;
    size_t workspace_bytes;
    cublasHandle_t cublas;
#ifdef BENCH_CUDNN
    cudnn_lib dnn;
#endif
} convs;

typedef struct conv_case {
    const convs *all;
    mpt_conv2d_args args;
    int direction;
} conv_case;

typedef struct conv_result {
    double flops, ours, kernel, cublas, cudnn; /* seconds; 0: not measured */
} conv_result;

/* small: each dimension an eighth, for a look at whether it works */
static mpt_conv2d_args conv_args(const conv_shape *shape, int batch_size, bool small) {
    conv_shape used = *shape;

    if (small) {
        used.hw = (shape->hw + 7) / 8;
        used.c = (shape->c + 7) / 8;
        used.k = shape->k / 8;
    }
    return conv_shape_args(&used, batch_size);
}

static size_t conv_workspace_bytes(const bench *b, const mpt_conv2d_args *a, int direction) {
    return direction == FPROP   ? b->ops->conv2d_fprop_workspace_bytes(b->self, a)
           : direction == DGRAD ? b->ops->conv2d_dgrad_workspace_bytes(b->self, a)
                                : b->ops->conv2d_wgrad_workspace_bytes(b->self, a);
}

static size_t larger(size_t a, size_t b) {
    return a > b ? a : b;
}

static convs convs_open(bench *b) {
    size_t x = 0, w = 0, y = 0, matrix = 0;
    convs v;
    int i, direction;

    memset(&v, 0, sizeof v);
    v.b = b;
    v.workspace_bytes = (size_t)(b->m.once ? 1 : 256) << 20; /* cuDNN may use as much */
    for (i = 0; i < NUM_RESNET50_CONVS; i++) {
        mpt_conv2d_args a = conv_args(&resnet50_convs[i], b->batch_size, b->m.once);
        int pixels = a.n * a.p * a.q;
        x = larger(x, gemm_elements(a.n * a.h * a.wd, a.c));
        w = larger(w, gemm_elements(a.k, a.r * a.s * a.c));
        y = larger(y, gemm_elements(pixels, a.k));
        matrix = larger(matrix, gemm_elements(pixels, a.r * a.s * larger(a.c, a.k)));
        for (direction = FPROP; direction <= WGRAD; direction++)
            v.workspace_bytes = larger(v.workspace_bytes, conv_workspace_bytes(b, &a, direction));
    }
    v.x = device_random(x, MPT_F16);
    v.w = device_random(w, MPT_F16);
    v.y = device_random(y, MPT_F16);
    v.matrix = device_random(matrix, MPT_F16);
    v.out = device_alloc(2 * larger(x, y));
    v.dw = (float *)device_alloc(w * sizeof(float));
    v.workspace = device_alloc(v.workspace_bytes);
    if (cublasCreate(&v.cublas)) give_up("cublasCreate failed");
#ifdef BENCH_CUDNN
    v.dnn = cudnn_open(v.workspace, v.workspace_bytes);
#endif
    return v;
}

static void convs_close(convs *v) {
#ifdef BENCH_CUDNN
    cudnn_close(&v->dnn);
#endif
    cublasDestroy(v->cublas);
    cudaFree(v->workspace);
    cudaFree(v->dw);
    cudaFree(v->out);
    cudaFree(v->matrix);
    cudaFree(v->y);
    cudaFree(v->w);
    cudaFree(v->x);
}

static bool conv_run(void *user) {
    conv_case *v = (conv_case *)user;
    const bench *b = v->all->b;
    mpt_result rc = v->direction == FPROP   ? b->ops->conv2d_fprop(b->self, &v->args)
                    : v->direction == DGRAD ? b->ops->conv2d_dgrad(b->self, &v->args)
                                            : b->ops->conv2d_wgrad(b->self, &v->args);

    MPT_OK_OR_GIVE_UP(b->ctx, rc);
    return true;
}

static bool conv_run_kernel(void *user) {
    const conv_case *v = (const conv_case *)user;
    int error = v->direction == FPROP   ? mptk_conv2d_fprop(&v->args, NULL)
                : v->direction == DGRAD ? mptk_conv2d_dgrad(&v->args, NULL)
                                        : mptk_conv2d_wgrad(&v->args, NULL);

    CUDA_OK((cudaError_t)error);
    return true;
}

/* run: conv_run, or conv_run_kernel, as the backend may prefer cuBLAS */
static double conv_seconds(const convs *all, const mpt_conv2d_args *a, int direction,
                           device_work run) {
    conv_case v;

    v.all = all;
    v.args = *a;
    v.direction = direction;
    v.args.workspace = all->workspace;
    v.args.workspace_bytes = conv_workspace_bytes(all->b, a, direction);
    v.args.w = all->w;
    v.args.x = all->x;
    v.args.dy = all->y;
    v.args.y = v.args.dx = all->out;
    v.args.dw = all->dw;
    return seconds_of(&all->b->m, run, &v);
}

/* As many multiplications as the convolution, in the same roles: pixels x outputs x taps for fprop;
   for dgrad each pixel of x meets r s / stride^2 taps. */
static double gemm_seconds(const convs *all, const mpt_conv2d_args *a, int direction) {
    int pixels = a->n * a->p * a->q, taps = a->r * a->s;
    gemm g;

    memset(&g, 0, sizeof g);
    g.handle = all->cublas;
    g.a = all->matrix;
    g.b = all->w;
    g.c = all->out;
    g.rows = pixels;
    g.columns = a->k;
    g.depth = taps * a->c;
    if (direction == DGRAD) {
        g.rows = a->n * a->h * a->wd;
        g.columns = a->c;
        g.depth = taps * a->k / (a->stride * a->stride);
        g.b_by_row = true;
    } else if (direction == WGRAD) {
        g.a = all->y;
        g.b = all->matrix;
        g.c = all->dw;
        g.rows = a->k;
        g.columns = taps * a->c;
        g.depth = pixels;
        g.deep = g.b_by_row = true;
    }
    return seconds_of(&all->b->m, gemm_run, &g);
}

static double cudnn_seconds(convs *all, const mpt_conv2d_args *a, int direction) {
#ifdef BENCH_CUDNN
    cudnn_conv v;

    cudnn_describe(&all->dnn, a);
    memset(&v, 0, sizeof v);
    v.lib = &all->dnn;
    v.direction = directions[direction][0];
    v.x = direction == DGRAD ? all->out : all->x;
    v.w = direction == WGRAD ? all->dw : all->w;
    v.y = direction == FPROP ? all->out : all->y;
    return cudnn_search(&v) ? seconds_of(&all->b->m, cudnn_run, &v) : 0;
#else
    (void)all, (void)a, (void)direction;
    return 0;
#endif
}

static conv_result conv_measure(convs *all, const conv_shape *shape, int direction) {
    mpt_conv2d_args a = conv_args(shape, all->b->batch_size, all->b->m.once);
    conv_result r;

    r.flops = 2.0 * a.n * a.p * a.q * a.k * a.r * a.s * a.c;
    r.ours = conv_seconds(all, &a, direction, conv_run);
    r.kernel = shape->r == 1 && shape->stride == 1
                   ? conv_seconds(all, &a, direction, conv_run_kernel)
                   : r.ours;
    r.cublas = gemm_seconds(all, &a, direction);
    r.cudnn = cudnn_seconds(all, &a, direction);
    return r;
}

static void conv_print(bench *b, const conv_shape *shape, int direction, const conv_result *r) {
    printf("%-20s %2d  %s %8.1f us %7.1f TFLOP/s  %4.2f of cuBLAS", shape->name, shape->count,
           directions[direction], r->ours * 1e6, r->flops / r->ours / 1e12, r->cublas / r->ours);
    if (r->cudnn > 0) printf("  %4.2f of cuDNN", r->cudnn / r->ours);
    if (r->kernel != r->ours) printf("  (kernels.cu alone: %.1f us)", r->kernel * 1e6);
    printf("\n");
    if (!b->json) return;
    fprintf(b->json, "  {\"layer\": \"%s\", \"count\": %d, \"direction\": \"%s\", ", shape->name,
            shape->count, directions[direction]);
    json_number(b, "seconds", r->ours, ", ");
    json_number(b, "tflops", r->flops / r->ours / 1e12, ", ");
    json_number(b, "kernel_seconds", r->kernel, ", ");
    json_number(b, "cublas_seconds", r->cublas, ", ");
    json_number(b, "cudnn_seconds", r->cudnn, "},\n");
}

/* Geometric means, each layer as often as the network has it. */
typedef struct conv_means {
    double of_cublas, of_cudnn; /* sums of logarithms */
    int count, count_cudnn;
} conv_means;

static void conv_means_add(conv_means *m, const conv_shape *shape, const conv_result *r) {
    m->of_cublas += shape->count * log(r->cublas / r->ours);
    m->count += shape->count;
    if (r->cudnn <= 0) return;
    m->of_cudnn += shape->count * log(r->cudnn / r->ours);
    m->count_cudnn += shape->count;
}

static void conv_means_print(bench *b, const conv_means *m) {
    double of_cublas = exp(m->of_cublas / m->count);
    double of_cudnn = m->count_cudnn ? exp(m->of_cudnn / m->count_cudnn) : 0;

    printf("geometric mean: %.3f of cuBLAS", of_cublas);
    if (of_cudnn > 0) printf(", %.3f of cuDNN", of_cudnn);
    printf("\n");
    json_text(b, "  null],\n");
    json_number(b, "conv_speed_of_cublas", of_cublas, ",\n");
    json_number(b, "conv_speed_of_cudnn", of_cudnn, ",\n");
}

/* The first layer needs no dgrad: nobody reads the gradient of the pictures. */
static void bench_convs(bench *b) {
    convs all = convs_open(b);
    conv_means means;
    int i, direction;

    memset(&means, 0, sizeof means);
    printf("convolutions of ResNet-50, FP16, batch %d\n", b->batch_size);
    json_text(b, "\"convolutions\": [\n");
    for (i = 0; i < NUM_RESNET50_CONVS; i++)
        for (direction = FPROP; direction <= WGRAD; direction++) {
            conv_result r;
            if (i == 0 && direction == DGRAD) continue;
            r = conv_measure(&all, &resnet50_convs[i], direction);
            conv_print(b, &resnet50_convs[i], direction, &r);
            conv_means_add(&means, &resnet50_convs[i], &r);
            fflush(stdout);
        }
    conv_means_print(b, &means);
    convs_close(&all);
}

/* ---- what memory limits ---------------------------------------------------------------------- */
/* Bytes are those that have to travel if nothing stays in a cache, each pass over a tensor counted.
   A share above 1 means that something did. */
static void memory_print(bench *b, const char *name, double seconds, double bytes) {
    double rate = bytes / seconds;

    printf("%-44s %8.1f us %7.0f GB/s  %4.2f of a copy\n", name, seconds * 1e6, rate / 1e9,
           rate / b->copy_bytes_per_second);
    if (!b->json) return;
    fprintf(b->json, "  {\"name\": \"%s\", ", name);
    json_number(b, "seconds", seconds, ", ");
    json_number(b, "bytes", bytes, ", ");
    json_number(b, "share_of_copy", rate / b->copy_bytes_per_second, "},\n");
}

typedef struct copy_case {
    void *from, *to;
    size_t bytes;
} copy_case;

static bool copy_run(void *user) {
    const copy_case *c = (const copy_case *)user;

    CUDA_OK(cudaMemcpyAsync(c->to, c->from, c->bytes, cudaMemcpyDeviceToDevice, 0));
    return true;
}

static void bench_copy(bench *b) { /* 512 MB: no cache holds it */
    copy_case c;
    double seconds;

    c.bytes = (size_t)(b->m.once ? 1 : 512) << 20;
    c.from = device_random(c.bytes / sizeof(float), MPT_F32);
    c.to = device_alloc(c.bytes);
    seconds = seconds_of(&b->m, copy_run, &c);
    b->copy_bytes_per_second = 2 * (double)c.bytes / seconds;
    printf("a copy in memory reads and writes %.0f GB/s\n", b->copy_bytes_per_second / 1e9);
    json_number(b, "copy_bytes_per_second", b->copy_bytes_per_second, ",\n");
    cudaFree(c.to);
    cudaFree(c.from);
}

typedef struct norm_case {
    bench *b;
    mpt_batchnorm_args args;
    bool backward;
} norm_case;

static bool norm_run(void *user) {
    norm_case *v = (norm_case *)user;
    const bench *b = v->b;

    MPT_OK_OR_GIVE_UP(b->ctx, v->backward ? b->ops->batchnorm_backward(b->self, &v->args)
                                          : b->ops->batchnorm_forward(b->self, &v->args));
    return true;
}

/* Seven vectors of the channels, one after the other. */
static void norm_vectors(mpt_batchnorm_args *a, float *channels) {
    a->gamma = channels;
    a->beta = channels + a->c;
    a->batch_mean = channels + 2 * a->c;
    a->batch_inv_std = channels + 3 * a->c;
    a->batch_var = channels + 4 * a->c;
    a->dgamma = channels + 5 * a->c;
    a->dbeta = channels + 6 * a->c;
}

/* Forward reads x for the statistics and again to normalise, and writes y: 6 bytes an element.
   Backward reads x, dy and y (for ReLU) for its sums, and again to write dx: 14. */
static void bench_norm(bench *b, int hw, int channels) {
    size_t count, workspace;
    norm_case v;
    char name[64];
    void *x, *y, *dy;

    memset(&v, 0, sizeof v);
    v.b = b;
    v.args.n = v.args.num_valid = b->batch_size;
    v.args.h = v.args.wd = hw;
    v.args.c = channels;
    v.args.training = v.args.relu = 1;
    v.args.epsilon = 1e-5f;
    v.args.dtype = MPT_F16;
    count = (size_t)b->batch_size * (size_t)(hw * hw) * (size_t)channels;
    v.args.x = x = device_random(count, MPT_F16);
    v.args.y = y = device_alloc(2 * count);
    v.args.dy = v.args.dx = dy = device_random(count, MPT_F16);
    norm_vectors(&v.args, (float *)device_random(7 * (size_t)channels, MPT_F32));
    workspace = larger(b->ops->batchnorm_forward_workspace_bytes(b->self, &v.args),
                       b->ops->batchnorm_backward_workspace_bytes(b->self, &v.args));
    v.args.workspace = device_alloc(workspace);
    v.args.workspace_bytes = workspace;
    snprintf(name, sizeof name, "batch norm + ReLU, %d x %d x %d", hw, hw, channels);
    memory_print(b, name, seconds_of(&b->m, norm_run, &v), 6.0 * (double)count);
    snprintf(name, sizeof name, "batch norm + ReLU, %d x %d x %d, backward", hw, hw, channels);
    v.backward = true;
    memory_print(b, name, seconds_of(&b->m, norm_run, &v), 14.0 * (double)count);
    cudaFree(v.args.workspace);
    cudaFree((void *)(uintptr_t)v.args.gamma);
    cudaFree(dy);
    cudaFree(y);
    cudaFree(x);
}

typedef struct softmax_case {
    bench *b;
    mpt_softmax_xent_args args;
} softmax_case;

static bool softmax_run(void *user) {
    softmax_case *v = (softmax_case *)user;

    MPT_OK_OR_GIVE_UP(v->b->ctx, v->b->ops->softmax_xent(v->b->self, &v->args));
    return true;
}

/* Logits are read and gradients written: 4 bytes an element. A row of 1000 is read twice, the
   second time from the cache. */
static void bench_softmax(bench *b) {
    int n = b->m.once ? 64 : 65536, classes = 1000;
    size_t count = (size_t)n * (size_t)classes;
    softmax_case v;
    void *logits = device_random(count, MPT_F16), *gradients = device_alloc(2 * count);

    memset(&v, 0, sizeof v);
    v.b = b;
    v.args.n = v.args.num_valid = n;
    v.args.classes = classes;
    v.args.logits = logits;
    v.args.dlogits = gradients;
    v.args.labels = (int32_t *)device_alloc((size_t)n * sizeof(int32_t));
    CUDA_OK(cudaMemset((void *)(uintptr_t)v.args.labels, 0, (size_t)n * sizeof(int32_t)));
    v.args.stats = (mpt_softmax_stats *)device_alloc(sizeof(mpt_softmax_stats));
    CUDA_OK(cudaMemset(v.args.stats, 0, sizeof(mpt_softmax_stats)));
    v.args.grad_scale = 1;
    v.args.dtype = MPT_F16;
    v.args.workspace_bytes = b->ops->softmax_xent_workspace_bytes(b->self, &v.args);
    v.args.workspace = device_alloc(v.args.workspace_bytes);
    memory_print(b, "softmax cross entropy, 1000 classes", seconds_of(&b->m, softmax_run, &v),
                 4.0 * (double)count);
    cudaFree(v.args.workspace);
    cudaFree(v.args.stats);
    cudaFree((void *)(uintptr_t)v.args.labels);
    cudaFree(gradients);
    cudaFree(logits);
}

typedef struct update_case {
    bench *b;
    mpt_update_args args;
} update_case;

static bool update_run(void *user) {
    update_case *v = (update_case *)user;

    v->args.step++;
    MPT_OK_OR_GIVE_UP(v->b->ctx, v->b->ops->update(v->b->self, &v->args));
    return true;
}

static void *device_copy_of(const void *host, size_t bytes) {
    void *p = device_alloc(bytes);

    CUDA_OK(cudaMemcpy(p, host, bytes, cudaMemcpyHostToDevice));
    return p;
}

/* All parameters as one tensor, in the chunks that a trainer would make. */
static void update_chunks(mpt_update_args *a, int64_t count) {
    mpt_update_segment segment;
    mpt_update_chunk *chunks;
    int64_t i;

    a->num_params = count;
    a->num_chunks = (count + MPT_UPDATE_CHUNK - 1) / MPT_UPDATE_CHUNK;
    a->num_segments = 1;
    memset(&segment, 0, sizeof segment);
    segment.num_chunks = a->num_chunks;
    segment.decays = 1;
    chunks = (mpt_update_chunk *)calloc((size_t)a->num_chunks, sizeof *chunks);
    if (!chunks) give_up("no memory");
    for (i = 0; i < a->num_chunks; i++) {
        int64_t left = count - i * MPT_UPDATE_CHUNK;
        chunks[i].offset = i * MPT_UPDATE_CHUNK;
        chunks[i].count = (int)(left < MPT_UPDATE_CHUNK ? left : MPT_UPDATE_CHUNK);
    }
    a->chunks = (mpt_update_chunk *)device_copy_of(chunks, (size_t)a->num_chunks * sizeof *chunks);
    a->segments = (mpt_update_segment *)device_copy_of(&segment, sizeof segment);
    free(chunks);
}

/* SGD with momentum on ResNet-50's 25,557,032 parameters. Gradients are read for the check and
   again for the update, weights and momentum are read and written, the 16-bit copy is written: 26
   bytes a parameter. The rate is tiny, so that a thousand updates change nothing much. */
static void bench_update(bench *b) {
    int64_t count = b->m.once ? 50000 : 25557032;
    mpt_step_state state;
    update_case v;

    memset(&v, 0, sizeof v);
    memset(&state, 0, sizeof state);
    mpt_loss_scaler_init(&state.scaler, NULL);
    state.beta1_power = state.beta2_power = 1;
    v.b = b;
    update_chunks(&v.args, count);
    v.args.state = (mpt_step_state *)device_copy_of(&state, sizeof state);
    v.args.weights = (float *)device_random((size_t)count, MPT_F32);
    v.args.row = (float *)device_random((size_t)count, MPT_F32);
    v.args.first = (float *)device_random((size_t)count, MPT_F32);
    v.args.half = device_alloc(2 * (size_t)count);
    v.args.half_dtype = MPT_F16;
    v.args.sums = (double *)device_alloc(2 * sizeof(double) * (size_t)v.args.num_chunks);
    v.args.ratios = (float *)device_alloc(sizeof(float));
    v.args.optimizer.kind = MPT_OPTIMIZER_SGD_MOMENTUM;
    v.args.optimizer.momentum = 0.9f;
    v.args.optimizer.learning_rate = 1e-9f;
    v.args.optimizer.weight_decay = 1e-4f;
    v.args.num_samples = b->batch_size;
    v.args.fitting = b->batch_size;
    v.args.rates[0] = v.args.rates[1] = v.args.rates[2] = v.args.rates[3] = 1e-9f;
    memory_print(b, "update, SGD with momentum, 25.6 million", seconds_of(&b->m, update_run, &v),
                 26.0 * (double)count);
    cudaFree(v.args.ratios);
    cudaFree(v.args.sums);
    cudaFree(v.args.half);
    cudaFree(v.args.first);
    cudaFree((void *)(uintptr_t)v.args.row);
    cudaFree(v.args.weights);
    cudaFree(v.args.state);
    cudaFree((void *)(uintptr_t)v.args.segments);
    cudaFree((void *)(uintptr_t)v.args.chunks);
}

static void bench_memory(bench *b) {
    printf("\nwhat memory limits\n");
    bench_copy(b);
    json_text(b, "\"memory_bound\": [\n");
    if (b->m.once) {
        bench_norm(b, 7, 64);
    } else {
        bench_norm(b, 112, 64);
        bench_norm(b, 56, 256);
        bench_norm(b, 28, 512);
        bench_norm(b, 14, 1024);
    }
    bench_softmax(b);
    bench_update(b);
    json_text(b, "  null],\n");
}

/* ---- training -------------------------------------------------------------------------------- */
typedef struct training {
    bench *b;
    const char *arch;
    int image_size, num_classes;
    mpt_model *model;
    mpt_trainer *trainer;
    mpt_trainer_desc desc;
    mpt_batch batch; /* bytes, on the host: each step copies them to the device, as in real life */
} training;

static bool training_run(void *user) {
    training *t = (training *)user;
    mpt_step_report report;

    MPT_OK_OR_GIVE_UP(t->b->ctx, mpt_trainer_step(t->trainer, &t->batch, &report));
    return true;
}

static void training_make_model(training *t) {
    mpt_ctx *ctx = t->b->ctx;
    int last;

    MPT_OK_OR_GIVE_UP(ctx, mpt_model_create(ctx, t->image_size, t->image_size, 3, &t->model));
    last = mpt_zoo(t->model, t->arch, t->num_classes);
    MPT_OK_OR_GIVE_UP(ctx, mpt_model_finish(t->model, last));
    t->desc.precision = MPT_PRECISION_FP16;
    t->desc.optimizer.kind = MPT_OPTIMIZER_SGD_MOMENTUM;
    t->desc.optimizer.learning_rate = 0.001f; /* made-up data must not make weights run away */
}

static void training_make_batch(training *t, int n) {
    size_t bytes = (size_t)n * (size_t)t->image_size * (size_t)t->image_size * 3, i;
    uint8_t *pixels = (uint8_t *)malloc(bytes);
    int32_t *labels = (int32_t *)calloc((size_t)n, sizeof *labels);

    if (!pixels || !labels) give_up("no memory for a batch of %d", n);
    for (i = 0; i < bytes; i++) pixels[i] = (uint8_t)(i * 2654435761u >> 13);
    for (i = 0; i < (size_t)n; i++) labels[i] = (int32_t)i % t->num_classes;
    memset(&t->batch, 0, sizeof t->batch);
    t->batch.images.dtype = MPT_U8;
    t->batch.images.num_dims = 4;
    t->batch.images.dims[0] = t->batch.labels.dims[0] = n;
    t->batch.images.dims[1] = t->batch.images.dims[2] = t->image_size;
    t->batch.images.dims[3] = 3;
    t->batch.images.data = pixels;
    t->batch.labels.dtype = MPT_I32;
    t->batch.labels.num_dims = 1;
    t->batch.labels.data = labels;
    t->batch.num_valid = n;
}

/* The largest power of two times 32 whose plan fits what is free; 0: none. Beyond 1,024 nothing
   gets faster. */
static int training_largest_batch(training *t) {
    size_t available, total;
    mpt_memory_plan plan;
    int n, best = 0;

    CUDA_OK(cudaMemGetInfo(&available, &total));
    for (n = 32; n <= 1024; n *= 2) {
        MPT_OK_OR_GIVE_UP(t->b->ctx, mpt_model_plan(t->model, &t->desc, n, &plan));
        if (plan.total - plan.bookkeeping > available - available / 32) break;
        best = n;
    }
    return best;
}

/* Of steps that follow one another without a wait: the device works on one while the host prepares
   the next. */
static double training_seconds(training *t, int steps) {
    mpt_step_report report;
    double start;
    int i;

    for (i = 0; i < 3; i++) training_run(t);
    MPT_OK_OR_GIVE_UP(t->b->ctx, mpt_trainer_sync(t->trainer, &report));
    start = cli_seconds();
    for (i = 0; i < steps; i++) training_run(t);
    MPT_OK_OR_GIVE_UP(t->b->ctx, mpt_trainer_sync(t->trainer, &report));
    return (cli_seconds() - start) / steps;
}

static void bench_training(bench *b) {
    training t;
    double seconds;
    int n;

    memset(&t, 0, sizeof t);
    t.b = b;
    t.arch = b->m.once ? "resnet20" : "resnet50";
    t.image_size = b->m.once ? 16 : 224;
    t.num_classes = b->m.once ? 10 : 1000;
    training_make_model(&t);
    n = b->m.once ? 2 : training_largest_batch(&t);
    if (n == 0) give_up("%s: not even a batch of 32 fits this device", t.arch);
    MPT_OK_OR_GIVE_UP(b->ctx, mpt_trainer_create(t.model, &t.desc, n, &t.trainer));
    training_make_batch(&t, n);
    seconds = training_seconds(&t, b->m.once ? 2 : 30);
    printf("\ntraining %s, FP16, batch %d: %.1f ms a step, %.0f images/s\n", t.arch, n,
           seconds * 1e3, n / seconds);
    json_number(b, "training_batch_size", n, ",\n");
    json_number(b, "training_images_per_second", n / seconds, ",\n");
    mpt_trainer_destroy(t.trainer);
    mpt_model_destroy(t.model);
    free(t.batch.images.data);
    free(t.batch.labels.data);
}

/* ---- the program ----------------------------------------------------------------------------- */
static void bench_open(bench *b) {
    struct cudaDeviceProp device;
    mpt_ctx_desc desc;
    int runtime = 0, driver = 0, devices = 0;
    cudaError_t error = cudaGetDeviceCount(&devices);

    if (error || devices == 0)
        give_up("no GPU: %s", error ? cudaGetErrorString(error) : "there is none");
    if (!mpt_backend_cuda()) give_up("built without MPTRAIN_CUDA");
    memset(&desc, 0, sizeof desc);
    desc.backend = b->ops = mpt_backend_cuda();
    if (mpt_ctx_create(&desc, &b->ctx)) give_up("no context on this device");
    MPT_OK_OR_GIVE_UP(b->ctx, b->ops->open(b->ctx, 0, &b->self));
    CUDA_OK(cudaGetDeviceProperties(&device, 0));
    CUDA_OK(cudaRuntimeGetVersion(&runtime));
    CUDA_OK(cudaDriverGetVersion(&driver));
    printf("%s, sm_%d%d, %d SMs, %.1f GiB; CUDA %d.%d, driver for %d.%d; mptrain %s\n\n",
           device.name, device.major, device.minor, device.multiProcessorCount,
           (double)device.totalGlobalMem / (1 << 30), runtime / 1000, runtime % 1000 / 10,
           driver / 1000, driver % 1000 / 10, mpt_version());
    if (!b->json) return;
    fprintf(b->json, "{\"device\": \"%s\", \"sm\": %d, \"sms\": %d, \"cuda\": %d, ", device.name,
            device.major * 10 + device.minor, device.multiProcessorCount, runtime);
    json_number(b, "memory_bytes", (double)device.totalGlobalMem, ",\n");
}

int main(int argc, char **argv) {
    int64_t batch_size = 64;
    const char *json = NULL;
    cli_option options[3];
    cli_command command;
    cli_list operands = {NULL, 0, 0}; /* there are none */
    bench b;
    int code;

    memset(&b, 0, sizeof b);
    options[0] = cli_int("batch-size", 'b', &batch_size, 1, 1024, "N", "of convolutions");
    options[1] = cli_text("json", 0, &json, "FILE", "write the numbers here too");
    options[2] = cli_flag("smoke", 0, &b.m.once, "tiny shapes, once: does it work?");
    memset(&command, 0, sizeof command);
    command.name = "bench_device";
    command.about = "Measures kernels.cu on this GPU.";
    command.version = "bench_device";
    command.options = options;
    command.num_options = 3;
    code = cli_parse(&command, argc, argv, &operands);
    cli_list_free(&operands);
    if (code != CLI_RUN) return code;
    b.batch_size = b.m.once ? 1 : (int)batch_size;
    if (json && !(b.json = fopen(json, "w"))) give_up("%s: can't be written", json);
    bench_open(&b);
    bench_convs(&b);
    bench_memory(&b);
    bench_training(&b);
    json_text(&b, "\"complete\": true}\n");
    if (b.json && fclose(b.json)) give_up("%s: can't be written", json);
    b.ops->close(b.self);
    mpt_ctx_destroy(b.ctx);
    return 0;
}
