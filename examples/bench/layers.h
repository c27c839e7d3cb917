/* layers.h - bench layers: each layer of a network alone, forward and backward

   Operators are called through the backend's table, as a trainer calls them; layers of one shape
   are measured once and counted. An operator runs again and again on the same memory, so a small
   one finds its data in the cache, where a step would not: shares of the memory bandwidth above
   100 % come from that. Bytes are those of the tensors an operator reads and writes, once each. */
#ifndef MPT_BENCH_LAYERS_H
#define MPT_BENCH_LAYERS_H

#include "bench/limits.h"
#include "bench/network.h"

typedef enum bench_op_kind {
    BENCH_CONV_FPROP = 0,
    BENCH_CONV_DGRAD,
    BENCH_CONV_WGRAD,
    BENCH_DENSE_FPROP,
    BENCH_DENSE_DGRAD,
    BENCH_DENSE_WGRAD,
    BENCH_NORM_FORWARD,
    BENCH_NORM_BACKWARD,
    BENCH_MAX_POOL_FORWARD,
    BENCH_MAX_POOL_BACKWARD,
    BENCH_AVG_POOL_FORWARD,
    BENCH_AVG_POOL_BACKWARD,
    BENCH_GLOBAL_POOL_FORWARD,
    BENCH_GLOBAL_POOL_BACKWARD
} bench_op_kind;

enum { BENCH_OPS_A_LAYER = 3 };

/* One operator on one shape. */
typedef struct bench_op {
    bench_op_kind kind;
    const char *direction; /* "fprop", "backward" ... */
    bool backward;
    int count;            /* layers of this shape */
    mpt_layer_info layer; /* the first of them */
    mpt_conv2d_args conv; /* of these, the one that kind says */
    mpt_dense_args dense;
    mpt_batchnorm_args norm;
    mpt_pool2d_args pool;
    double work;   /* operations, or bytes, of one call */
    int64_t calls; /* a round */
    char name[112];
    struct bench_layers *all;
} bench_op;

typedef struct bench_buffers { /* shared by all operators, as large as the largest needs */
    size_t input, output, weights, channels, workspace; /* bytes of each */
    void *x, *y, *dy, *dx, *w, *residual, *dresidual, *scratch;
    float *dw, *vectors[8]; /* per channel: gamma, beta, mean, inv_std, var, dgamma, dbeta, bias */
} bench_buffers;

typedef struct bench_layers {
    bench_network network;
    bench_op *ops; /* [num_ops] */
    int num_ops;
    bench_space memory;
    bench_buffers b;
    bench_limits limits;
} bench_layers;

/* ---- from a layer to its operators ----------------------------------------------------------- */
static size_t bench_max(size_t a, size_t b) {
    return a > b ? a : b;
}

/* The layer that reads layer i's output, if it is the only one that does; -1: none. */
static int bench_only_reader(const mpt_model *m, int layer) {
    int i, k, found = -1, readers = 0;
    mpt_layer_info info;

    for (i = layer + 1; i < mpt_model_num_layers(m); i++) {
        if (mpt_model_layer(m, i, &info)) continue;
        for (k = 0; k < info.num_inputs; k++) {
            if (info.inputs[k] != layer + 1) continue;
            found = i;
            readers++;
        }
    }
    return readers == 1 ? found : -1;
}

/* A batch norm that is computed together with what follows: is it an addition, is it a ReLU? */
static void bench_norm_tail(const mpt_model *m, int layer, bool *add, bool *relu) {
    mpt_layer_info info;

    *add = *relu = false;
    if (mpt_model_layer(m, layer, &info) || !info.fused) return;
    layer = bench_only_reader(m, layer);
    if (layer < 0 || mpt_model_layer(m, layer, &info)) return;
    *add = !strcmp(info.kind, "add");
    *relu = true; /* such a row always ends in one */
}

static void bench_fill_conv(const bench_network *n, const mpt_layer_info *l, const int64_t in[3],
                            mpt_conv2d_args *a) {
    a->n = a->num_valid = n->batch_size;
    a->h = (int)in[0];
    a->wd = (int)in[1];
    a->c = (int)in[2];
    a->k = (int)l->channels;
    a->r = a->s = l->kernel;
    a->p = (int)l->height;
    a->q = (int)l->width;
    a->stride = l->stride;
    a->padding = l->padding;
    a->dtype = n->dtype;
}

static void bench_fill_dense(const bench_network *n, const mpt_layer_info *l, const int64_t in[3],
                             mpt_dense_args *a) {
    a->n = a->num_valid = n->batch_size;
    a->in = (int)(in[0] * in[1] * in[2]);
    a->out = (int)l->channels;
    a->dtype = n->dtype;
}

static void bench_fill_norm(const bench_network *n, const mpt_layer_info *l, bool relu,
                            mpt_batchnorm_args *a) {
    a->n = a->num_valid = n->batch_size;
    a->h = (int)l->height;
    a->wd = (int)l->width;
    a->c = (int)l->channels;
    a->training = 1;
    a->relu = relu;
    a->epsilon = 1e-5f;
    a->dtype = n->dtype;
}

static void bench_fill_pool(const bench_network *n, const mpt_layer_info *l, const int64_t in[3],
                            mpt_pool2d_args *a) {
    a->n = a->num_valid = n->batch_size;
    a->h = (int)in[0];
    a->wd = (int)in[1];
    a->c = (int)in[2];
    a->p = (int)l->height;
    a->q = (int)l->width;
    a->kernel = l->kernel;
    a->stride = l->stride;
    a->padding = l->padding;
    a->dtype = n->dtype;
}

/* Work of one call. For batch norm and pools: tensors of the input's and of the output's size. */
static double bench_op_work(const bench_network *n, const bench_op *op, double in, double out) {
    double size = (double)mpt_dtype_size(n->dtype);
    bool residual = op->norm.residual != NULL;

    switch (op->kind) {
    case BENCH_NORM_FORWARD: return size * (2 + residual) * out;
    case BENCH_NORM_BACKWARD: return size * (3 + (op->norm.relu != 0) + residual) * out;
    case BENCH_MAX_POOL_FORWARD:
    case BENCH_MAX_POOL_BACKWARD: return size * (in + out) + out; /* and a byte for the place */
    case BENCH_AVG_POOL_FORWARD:
    case BENCH_AVG_POOL_BACKWARD:
    case BENCH_GLOBAL_POOL_FORWARD:
    case BENCH_GLOBAL_POOL_BACKWARD: return size * (in + out);
    default: return 2 * n->batch_size * bench_layer_multiply_adds(n, &op->layer);
    }
}

/* Do two operators do the same work? Pointers are not set yet but for the mark of a residual. */
static bool bench_op_same(const bench_op *a, const bench_op *b) {
    return a->kind == b->kind && !memcmp(&a->conv, &b->conv, sizeof a->conv) &&
           !memcmp(&a->dense, &b->dense, sizeof a->dense) &&
           !memcmp(&a->norm, &b->norm, sizeof a->norm) &&
           !memcmp(&a->pool, &b->pool, sizeof a->pool);
}

static void bench_op_add(bench_layers *all, bench_op *op, bench_op_kind kind, const char *direction,
                         bool backward) {
    int i;

    op->kind = kind;
    op->direction = direction;
    op->backward = backward;
    for (i = 0; i < all->num_ops; i++) {
        if (!bench_op_same(&all->ops[i], op)) continue;
        all->ops[i].count++;
        return;
    }
    op->count = 1;
    all->ops[all->num_ops++] = *op;
}

/* A layer that reads the picture computes no gradient for it. */
static void bench_layer_ops(bench_layers *all, int layer) {
    static const char residual_mark = 0;
    bench_network *n = &all->network;
    bench_op op;
    int64_t in[3];
    bool first, add, relu;

    memset(&op, 0, sizeof op);
    if (mpt_model_layer(n->model, layer, &op.layer)) return;
    first = op.layer.inputs[0] == MPT_INPUT;
    bench_network_shape(n, op.layer.inputs[0], in);
    if (!strcmp(op.layer.kind, "conv2d")) {
        bench_fill_conv(n, &op.layer, in, &op.conv);
        bench_op_add(all, &op, BENCH_CONV_FPROP, "fprop", false);
        if (!first) bench_op_add(all, &op, BENCH_CONV_DGRAD, "dgrad", true);
        bench_op_add(all, &op, BENCH_CONV_WGRAD, "wgrad", true);
    } else if (!strcmp(op.layer.kind, "dense")) {
        bench_fill_dense(n, &op.layer, in, &op.dense);
        bench_op_add(all, &op, BENCH_DENSE_FPROP, "fprop", false);
        if (!first) bench_op_add(all, &op, BENCH_DENSE_DGRAD, "dgrad", true);
        bench_op_add(all, &op, BENCH_DENSE_WGRAD, "wgrad", true);
    } else if (!strcmp(op.layer.kind, "batchnorm")) {
        bench_norm_tail(n->model, layer, &add, &relu);
        bench_fill_norm(n, &op.layer, relu, &op.norm);
        if (add) op.norm.residual = &residual_mark;
        bench_op_add(all, &op, BENCH_NORM_FORWARD, "forward", false);
        bench_op_add(all, &op, BENCH_NORM_BACKWARD, "backward", true);
    } else if (strstr(op.layer.kind, "_pool")) {
        bench_op_kind kind = !strcmp(op.layer.kind, "max_pool")   ? BENCH_MAX_POOL_FORWARD
                             : !strcmp(op.layer.kind, "avg_pool") ? BENCH_AVG_POOL_FORWARD
                                                                  : BENCH_GLOBAL_POOL_FORWARD;
        bench_fill_pool(n, &op.layer, in, &op.pool);
        bench_op_add(all, &op, kind, "forward", false);
        bench_op_add(all, &op, (bench_op_kind)(kind + 1), "backward", true);
    }
}

/* ---- memory ---------------------------------------------------------------------------------- */
static size_t bench_op_workspace(const bench_layers *all, const bench_op *op) {
    const mpt_backend *b = all->memory.backend;
    void *self = all->memory.self;

    switch (op->kind) {
    case BENCH_CONV_FPROP: return b->conv2d_fprop_workspace_bytes(self, &op->conv);
    case BENCH_CONV_DGRAD: return b->conv2d_dgrad_workspace_bytes(self, &op->conv);
    case BENCH_CONV_WGRAD: return b->conv2d_wgrad_workspace_bytes(self, &op->conv);
    case BENCH_DENSE_FPROP: return b->dense_fprop_workspace_bytes(self, &op->dense);
    case BENCH_DENSE_DGRAD: return b->dense_dgrad_workspace_bytes(self, &op->dense);
    case BENCH_DENSE_WGRAD: return b->dense_wgrad_workspace_bytes(self, &op->dense);
    case BENCH_NORM_FORWARD: return b->batchnorm_forward_workspace_bytes(self, &op->norm);
    case BENCH_NORM_BACKWARD: return b->batchnorm_backward_workspace_bytes(self, &op->norm);
    default: return 0;
    }
}

static void bench_buffers_size(bench_layers *all) {
    bench_buffers *b = &all->b;
    size_t size = mpt_dtype_size(all->network.dtype), batch = (size_t)all->network.batch_size;
    int i;

    for (i = 0; i < all->num_ops; i++) {
        const bench_op *op = &all->ops[i];
        int64_t in[3];
        bench_network_shape(&all->network, op->layer.inputs[0], in);
        b->input = bench_max(b->input, batch * size * (size_t)(in[0] * in[1] * in[2]));
        b->output = bench_max(b->output, batch * size *
                                             (size_t)(op->layer.height * op->layer.width *
                                                      op->layer.channels));
        b->weights = bench_max(b->weights, sizeof(float) * (size_t)op->layer.num_params);
        b->channels = bench_max(b->channels, sizeof(float) * (size_t)op->layer.channels);
        b->workspace = bench_max(b->workspace, bench_op_workspace(all, op));
    }
}

/* Of all pieces that bench_buffers_make and bench_op_point take. */
static size_t bench_buffers_bytes(const bench_layers *all) {
    const bench_buffers *b = &all->b;
    size_t pools = 0;
    int i;

    for (i = 0; i < all->num_ops; i++) pools += all->ops[i].kind == BENCH_MAX_POOL_FORWARD;
    return 2 * bench_space_round(b->input) + (4 + pools) * bench_space_round(b->output) +
           2 * bench_space_round(b->weights) + 8 * bench_space_round(b->channels) +
           bench_space_round(b->workspace);
}

static int bench_buffers_make(bench_layers *all) {
    bench_buffers *b = &all->b;
    bench_space *m = &all->memory;
    mpt_dtype dtype = all->network.dtype;
    int i, code;

    bench_buffers_size(all);
    code = bench_space_allocate(m, bench_buffers_bytes(all));
    if (code) return code;
    b->x = bench_space_take(m, b->input);
    b->dx = bench_space_take(m, b->input);
    b->y = bench_space_take(m, b->output);
    b->dy = bench_space_take(m, b->output);
    b->residual = bench_space_take(m, b->output);
    b->dresidual = bench_space_take(m, b->output);
    b->w = bench_space_take(m, b->weights);
    b->dw = (float *)bench_space_take(m, b->weights);
    b->scratch = bench_space_take(m, b->workspace);
    for (i = 0; i < 8; i++) b->vectors[i] = (float *)bench_space_take(m, b->channels);
    for (i = 0; i < 8 && !code; i++)
        code = bench_space_fill(m, b->vectors[i], b->channels, MPT_F32, (uint32_t)i);
    if (!code) code = bench_space_fill(m, b->x, b->input, dtype, 7);
    if (!code) code = bench_space_fill(m, b->dy, b->output, dtype, 7);
    if (!code) code = bench_space_fill(m, b->residual, b->output, dtype, 7);
    return code ? code : bench_space_fill(m, b->w, b->weights, dtype, 7);
}

static void bench_norm_point(const bench_buffers *b, mpt_batchnorm_args *a) {
    bool residual = a->residual != NULL;

    a->x = b->x;
    a->y = b->y;
    a->dy = b->dy;
    a->dx = b->dx;
    a->residual = residual ? b->residual : NULL;
    a->dresidual = residual ? b->dresidual : NULL;
    a->gamma = b->vectors[0];
    a->beta = b->vectors[1];
    a->batch_mean = b->vectors[2];
    a->batch_inv_std = b->vectors[3];
    a->batch_var = b->vectors[4];
    a->dgamma = b->vectors[5];
    a->dbeta = b->vectors[6];
    a->workspace = b->scratch;
    a->workspace_bytes = b->workspace;
}

/* Where each operator finds its memory. Places of maxima belong to one shape alone: those of
   another could lie outside the picture. Forward comes first and fills them. */
static void bench_op_point(bench_layers *all, bench_op *op, uint8_t **argmax) {
    const bench_buffers *b = &all->b;
    bool bias = op->layer.use_bias;

    if (op->kind == BENCH_MAX_POOL_FORWARD)
        *argmax = (uint8_t *)bench_space_take(&all->memory, b->output);
    op->conv.x = op->dense.x = op->pool.x = b->x;
    op->conv.y = op->dense.y = op->pool.y = b->y;
    op->conv.dy = op->dense.dy = op->pool.dy = b->dy;
    op->conv.dx = op->dense.dx = op->pool.dx = b->dx;
    op->conv.w = op->dense.w = b->w;
    op->conv.dw = op->dense.dw = b->dw;
    op->conv.bias = op->dense.bias = bias ? b->vectors[7] : NULL;
    op->conv.dbias = op->dense.dbias = bias ? b->vectors[6] : NULL;
    op->conv.workspace = op->dense.workspace = b->scratch;
    op->conv.workspace_bytes = op->dense.workspace_bytes = b->workspace;
    op->pool.argmax = *argmax;
    bench_norm_point(b, &op->norm);
}

/* ---- measuring ------------------------------------------------------------------------------- */
static mpt_result bench_op_call(const bench_op *op) {
    const mpt_backend *b = op->all->memory.backend;
    void *self = op->all->memory.self;

    switch (op->kind) {
    case BENCH_CONV_FPROP: return b->conv2d_fprop(self, &op->conv);
    case BENCH_CONV_DGRAD: return b->conv2d_dgrad(self, &op->conv);
    case BENCH_CONV_WGRAD: return b->conv2d_wgrad(self, &op->conv);
    case BENCH_DENSE_FPROP: return b->dense_fprop(self, &op->dense);
    case BENCH_DENSE_DGRAD: return b->dense_dgrad(self, &op->dense);
    case BENCH_DENSE_WGRAD: return b->dense_wgrad(self, &op->dense);
    case BENCH_NORM_FORWARD: return b->batchnorm_forward(self, &op->norm);
    case BENCH_NORM_BACKWARD: return b->batchnorm_backward(self, &op->norm);
    case BENCH_MAX_POOL_FORWARD: return b->max_pool_forward(self, &op->pool);
    case BENCH_MAX_POOL_BACKWARD: return b->max_pool_backward(self, &op->pool);
    case BENCH_AVG_POOL_FORWARD: return b->avg_pool_forward(self, &op->pool);
    case BENCH_AVG_POOL_BACKWARD: return b->avg_pool_backward(self, &op->pool);
    case BENCH_GLOBAL_POOL_FORWARD: return b->global_avg_pool_forward(self, &op->pool);
    default: return b->global_avg_pool_backward(self, &op->pool);
    }
}

static int bench_op_run(void *user) {
    const bench_op *op = (const bench_op *)user;
    mpt_result rc = MPT_OK;
    int64_t i;

    for (i = 0; i < op->calls && rc == MPT_OK; i++) rc = bench_op_call(op);
    if (rc == MPT_OK) return bench_space_wait(&op->all->memory);
    return cli_error("bench", CLI_EXIT_FAILURE, "%s: %s", op->name,
                     mpt_last_error(op->all->memory.ctx)->message);
}

/* Rounds of about five milliseconds: shorter ones measure the clock and the waking of threads. */
static int bench_op_prepare(bench_layers *all, bench_op *op, uint8_t **argmax) {
    int64_t in[3];
    double start, seconds;
    int code;

    op->all = all;
    bench_network_shape(&all->network, op->layer.inputs[0], in);
    op->work = bench_op_work(&all->network, op,
                             (double)all->network.batch_size * (double)(in[0] * in[1] * in[2]),
                             (double)all->network.batch_size *
                                 (double)(op->layer.height * op->layer.width * op->layer.channels));
    snprintf(op->name, sizeof op->name, "%.60s %s", op->layer.name, op->direction);
    if (op->count > 1) snprintf(op->name + strlen(op->name), 16, " (x %d)", op->count);
    bench_op_point(all, op, argmax);
    op->calls = 1;
    code = bench_op_run(op);
    start = cli_seconds();
    if (!code) code = bench_op_run(op);
    seconds = cli_seconds() - start;
    op->calls = seconds > 0.005 ? 1 : (int64_t)(0.005 / (seconds + 1e-7)) + 1;
    return code;
}

static void bench_op_more(const bench_case *c, bool json) {
    const bench_op *op = (const bench_op *)c->user;
    double seconds = op->work / c->median;

    if (!json) {
        printf("  %.4f ms", 1000 * seconds);
        return;
    }
    printf(",\"layer\":");
    cli_json_text(stdout, op->layer.name);
    printf(",\"kind\":\"%s\",\"direction\":\"%s\",\"count\":%d,\"output\":[%d,%lld,%lld,%lld],"
           "\"seconds\":%.6g",
           op->layer.kind, op->direction, op->count, op->all->network.batch_size,
           (long long)op->layer.height, (long long)op->layer.width, (long long)op->layer.channels,
           seconds);
}

static void bench_layers_sum(const bench_layers *all, const bench_case *cases, bool json) {
    double seconds[2] = {0, 0};
    int i;

    for (i = 0; i < all->num_ops; i++)
        seconds[all->ops[i].backward] += all->ops[i].count * all->ops[i].work / cases[i].median;
    if (json)
        printf("{\"bench\":\"layers\",\"case\":\"all\",\"arch\":\"%s\",\"precision\":\"%s\","
               "\"batch_size\":%d,\"forward_seconds\":%.6g,\"backward_seconds\":%.6g}\n",
               all->network.arch, all->network.precision, all->network.batch_size, seconds[0],
               seconds[1]);
    else
        printf("%-8s all of %s, batch %d, %s: forward %.2f ms, backward %.2f ms (medians)\n",
               "layers", all->network.arch, all->network.batch_size, all->network.precision,
               1000 * seconds[0], 1000 * seconds[1]);
}

static void bench_layers_free(bench_layers *all) {
    free(all->ops);
    bench_space_close(&all->memory);
    mpt_model_destroy(all->network.model);
    bench_limits_free(&all->limits);
}

static int bench_layers_make(mpt_ctx *ctx, const bench_options *o, bench_layers *all) {
    uint8_t *argmax = NULL;
    int i, count, code = bench_network_make(ctx, o, &all->network);

    if (!code) code = bench_space_open(ctx, o->device, &all->memory);
    if (code) return code;
    count = mpt_model_num_layers(all->network.model);
    all->ops = (bench_op *)calloc((size_t)count * BENCH_OPS_A_LAYER, sizeof *all->ops);
    if (!all->ops) return cli_error("bench", CLI_EXIT_FAILURE, "no memory");
    for (i = 0; i < count; i++) bench_layer_ops(all, i);
    code = bench_buffers_make(all);
    for (i = 0; i < all->num_ops && !code; i++) code = bench_op_prepare(all, &all->ops[i], &argmax);
    return code;
}

/* The limits come last: what a layer is a share of is told by their places. */
static int bench_layers_measure(bench_layers *all, bench_case *cases, const bench_options *o) {
    int i, n = all->num_ops, code;

    for (i = 0; i < n; i++) {
        bench_op *op = &all->ops[i];
        bool flops = op->kind < BENCH_NORM_FORWARD;
        cases[i] = bench_make(op->name, flops ? "flops" : "bytes", op->work * (double)op->calls,
                              bench_op_run, op);
        cases[i].reference = flops ? n : n + 1;
        cases[i].limit_name = flops ? all->limits.flops_name : all->limits.bytes_name;
        cases[i].more = bench_op_more;
    }
    cases[n] = bench_flops_limit(&all->limits);
    cases[n + 1] = bench_bytes_limit(&all->limits);
    code = bench_run(cases, n + 2, o->rounds);
    if (code) return code;
    bench_print("layers", cases, n + 2, o->json);
    bench_layers_sum(all, cases, o->json);
    return 0;
}

static int bench_layers_kind(mpt_ctx *ctx, const bench_options *o) {
    bench_layers all;
    bench_case *cases = NULL;
    int code;

    memset(&all, 0, sizeof all);
    code = bench_limits_make(ctx, o, &all.limits);
    if (!code) code = bench_layers_make(ctx, o, &all);
    if (!code) {
        cases = (bench_case *)calloc((size_t)all.num_ops + 2, sizeof *cases);
        code = cases ? bench_layers_measure(&all, cases, o)
                     : cli_error("bench", CLI_EXIT_FAILURE, "no memory");
    }
    free(cases);
    bench_layers_free(&all);
    return code;
}

#endif /* MPT_BENCH_LAYERS_H */
