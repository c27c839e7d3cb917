/* training.h - what the tests of models and trainers share: a trainer with all around it, batches
   of random pictures, snapshots of what was learned

       rig_desc d = rig_small(small_net, 4);          a net, 4 records a lane
       rig r = rig_open(&d);
       pictures p = pictures_make(&d, 8, 1);          8 pictures, seed 1
       mpt_batch b = pictures_batch(&p, 0, 4);        the first four of them
       CHECK_OK(r.ctx, mpt_trainer_step(r.trainer, &b, &report));
       pictures_free(&p);
       rig_close(&r); */
#ifndef TRAINING_H
#define TRAINING_H

#include "mpt_test.h"

#define COUNT(array) ((int)(sizeof(array) / sizeof((array)[0])))

typedef int (*net_fn)(mpt_model *m); /* wires a net; returns the logits */

typedef struct rig_desc {
    int height, width, channels, classes;
    net_fn net;      /* either this */
    const char *zoo; /* or one of the zoo */
    int batch_size;
    int threads;                    /* 0: all cores */
    const char *family;             /* of CPU kernels; NULL: the first that this processor has */
    const mpt_allocator *allocator; /* NULL: malloc */
    const mpt_backend *backend;     /* NULL: the CPU's */
    mpt_trainer_desc trainer;
} rig_desc;

typedef struct rig {
    mpt_ctx *ctx;
    mpt_model *model;
    mpt_trainer *trainer;
} rig;

static inline mpt_ctx *rig_ctx(const rig_desc *d) {
    mpt_ctx *ctx = NULL;
    mpt_ctx_desc cd;
    memset(&cd, 0, sizeof cd);
    cd.num_threads = d->threads;
    cd.backend = d->backend;
    if (d->allocator) cd.allocator = *d->allocator;
    CHECK_OK(NULL, mpt_ctx_create(&cd, &ctx));
    if (d->family) {
        ctx->backend->close(ctx->backend_self);
        ctx->backend_self = NULL;
        if (mpti_cpu_open_family(ctx, d->family, &ctx->backend_self) != MPT_OK) {
            mpt_ctx_destroy(ctx);
            return NULL; /* this processor has no such kernels */
        }
    }
    return ctx;
}

static inline mpt_model *rig_model(mpt_ctx *ctx, const rig_desc *d) {
    mpt_model *m = NULL;
    CHECK_OK(ctx, mpt_model_create(ctx, d->height, d->width, d->channels, &m));
    CHECK_OK(ctx, mpt_model_finish(m, d->net ? d->net(m) : mpt_zoo(m, d->zoo, d->classes)));
    return m;
}

/* trainer NULL: this processor lacks the family. */
static inline rig rig_open(const rig_desc *d) {
    rig r;
    memset(&r, 0, sizeof r);
    r.ctx = rig_ctx(d);
    if (!r.ctx) return r;
    r.model = rig_model(r.ctx, d);
    CHECK_OK(r.ctx, mpt_trainer_create(r.model, &d->trainer, d->batch_size, &r.trainer));
    return r;
}

static inline void rig_close(rig *r) {
    mpt_trainer_destroy(r->trainer);
    mpt_model_destroy(r->model);
    mpt_ctx_destroy(r->ctx);
    memset(r, 0, sizeof *r);
}

/* 8 x 8 x 3 pictures of 5 classes, FP32, momentum, no loss scaling. */
static inline rig_desc rig_small(net_fn net, int batch_size) {
    rig_desc d;
    memset(&d, 0, sizeof d);
    d.height = d.width = 8;
    d.channels = 3;
    d.classes = 5;
    d.net = net;
    d.batch_size = batch_size;
    d.trainer.precision = MPT_PRECISION_FP32;
    d.trainer.optimizer.learning_rate = 0.05f;
    return d;
}

static inline rig_desc rig_zoo(const char *zoo, int size, int channels, int batch_size) {
    rig_desc d = rig_small(NULL, batch_size);
    d.zoo = zoo;
    d.height = d.width = size;
    d.channels = channels;
    d.classes = 10;
    return d;
}

/* ---- nets ------------------------------------------------------------------------------------ */
static inline int net_conv(mpt_model *m, int x, int channels, int kernel, int stride, int padding,
                           int bias) {
    mpt_conv2d_desc d;
    memset(&d, 0, sizeof d);
    d.out_channels = channels;
    d.kernel = kernel;
    d.stride = stride;
    d.padding = padding;
    d.use_bias = bias;
    return mpt_conv2d(m, x, &d);
}

/* No batch norm: microbatches add up to one big batch. */
static inline int plain_net(mpt_model *m) {
    int x = mpt_relu(m, net_conv(m, MPT_INPUT, 6, 3, 1, 1, 1));
    x = mpt_relu(m, net_conv(m, mpt_max_pool(m, x, 2, 2, 0), 8, 3, 1, 1, 1));
    return mpt_dense(m, mpt_global_avg_pool(m, x), 5);
}

/* A residual block with batch norms, as in the zoo, and small. */
static inline int small_net(mpt_model *m) {
    int x = mpt_relu(m, mpt_batchnorm(m, net_conv(m, MPT_INPUT, 6, 3, 1, 1, 0), NULL));
    int y = mpt_relu(m, mpt_batchnorm(m, net_conv(m, x, 8, 3, 2, 1, 0), NULL));
    y = mpt_batchnorm(m, net_conv(m, y, 8, 3, 1, 1, 0), NULL);
    x = mpt_batchnorm(m, net_conv(m, x, 8, 1, 2, 0, 0), NULL);
    return mpt_dense(m, mpt_global_avg_pool(m, mpt_relu(m, mpt_add(m, y, x))), 5);
}

/* ---- pictures -------------------------------------------------------------------------------- */
typedef struct pictures {
    float *x; /* (n,h,w,c), -1 .. 1 */
    int32_t *labels;
    uint64_t *ids;
    int n, h, w, c;
} pictures;

static inline float pictures_random(uint64_t *state) { /* -1 .. 1, a multiple of 1/64 */
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (float)((int)(*state >> 57) - 64) / 64.0f;
}

static inline pictures pictures_make(const rig_desc *d, int n, uint64_t seed) {
    size_t per_picture = (size_t)d->height * d->width * d->channels, i;
    uint64_t state = seed * 77 + 5;
    pictures p;
    p.n = n;
    p.h = d->height;
    p.w = d->width;
    p.c = d->channels;
    p.x = (float *)malloc(per_picture * n * sizeof *p.x);
    p.labels = (int32_t *)malloc(n * sizeof *p.labels);
    p.ids = (uint64_t *)malloc(n * sizeof *p.ids);
    for (i = 0; i < 10; i++) pictures_random(&state);
    for (i = 0; i < per_picture * n; i++) p.x[i] = pictures_random(&state);
    for (i = 0; i < (size_t)n; i++) {
        p.labels[i] = (int32_t)((state >> 33) + i * 7) % d->classes;
        p.ids[i] = 1000 + i;
        pictures_random(&state);
    }
    return p;
}

static inline void pictures_free(pictures *p) {
    free(p->x);
    free(p->labels);
    free(p->ids);
    memset(p, 0, sizeof *p);
}

/* Pictures first .. first+n-1, n = lanes * capacity; valid: [lanes], NULL: all count. */
static inline mpt_batch pictures_lanes(const pictures *p, int first, int lanes, int capacity,
                                       const int32_t *valid) {
    mpt_batch b;
    int lane;
    CHECK(first + lanes * capacity <= p->n);
    memset(&b, 0, sizeof b);
    b.images.data = p->x + (size_t)first * p->h * p->w * p->c;
    b.images.dtype = MPT_F32;
    b.images.num_dims = 4;
    b.images.dims[0] = b.labels.dims[0] = lanes * capacity;
    b.images.dims[1] = p->h;
    b.images.dims[2] = p->w;
    b.images.dims[3] = p->c;
    b.labels.data = p->labels + first;
    b.labels.dtype = MPT_I32;
    b.labels.num_dims = 1;
    b.sample_ids = p->ids + first;
    b.num_lanes = lanes;
    b.lane_valid = valid;
    b.num_valid = valid ? 0 : lanes * capacity;
    for (lane = 0; valid && lane < lanes; lane++) b.num_valid += valid[lane];
    return b;
}

static inline mpt_batch pictures_batch(const pictures *p, int first, int n) {
    return pictures_lanes(p, first, 1, n, NULL);
}

/* ---- a loader over arrays -------------------------------------------------------------------- */
typedef struct arrays {
    mpt_tensor images, labels; /* (n,h,w,c) U8, (n) I32 */
} arrays;

static inline arrays arrays_make(const rig_desc *d, int n, uint64_t seed) {
    size_t per_picture = (size_t)d->height * d->width * d->channels, i;
    uint64_t state = seed * 131 + 17;
    arrays a;
    memset(&a, 0, sizeof a);
    a.images.data = malloc(per_picture * n);
    a.images.dtype = MPT_U8;
    a.images.num_dims = 4;
    a.images.dims[0] = a.labels.dims[0] = n;
    a.images.dims[1] = d->height;
    a.images.dims[2] = d->width;
    a.images.dims[3] = d->channels;
    a.labels.data = malloc(n * sizeof(int32_t));
    a.labels.dtype = MPT_I32;
    a.labels.num_dims = 1;
    for (i = 0; i < per_picture * n; i++)
        ((uint8_t *)a.images.data)[i] = (uint8_t)(127 + 127 * pictures_random(&state));
    for (i = 0; i < (size_t)n; i++)
        ((int32_t *)a.labels.data)[i] = (int32_t)(i * 7 % (size_t)d->classes);
    return a;
}

static inline void arrays_free(arrays *a) {
    free(a->images.data);
    free(a->labels.data);
}

static inline mpt_loader_desc arrays_desc(const rig_desc *d, const arrays *a, int lanes) {
    mpt_loader_desc ld;
    memset(&ld, 0, sizeof ld);
    ld.array_images = &a->images;
    ld.array_labels = &a->labels;
    ld.batch_size = d->batch_size;
    ld.height = d->height;
    ld.width = d->width;
    ld.channels = d->channels;
    ld.num_classes = d->classes;
    ld.num_lanes = lanes;
    ld.num_workers = 1;
    return ld;
}

static inline mpt_loader *arrays_open(mpt_ctx *ctx, const rig_desc *d, const arrays *a, int lanes) {
    mpt_loader_desc ld = arrays_desc(d, a, lanes);
    mpt_loader *loader = NULL;
    CHECK_OK(ctx, mpt_loader_create(ctx, &ld, &loader));
    return loader;
}

/* The next batch, over the ends of epochs. */
static inline mpt_batch arrays_next(mpt_ctx *ctx, mpt_loader *loader) {
    mpt_batch b;
    mpt_result rc = mpt_loader_next(loader, &b);
    if (rc == MPT_END) rc = mpt_loader_next(loader, &b);
    CHECK_OK(ctx, rc);
    return b;
}

/* ---- what was learned, as bytes -------------------------------------------------------------- */
typedef struct snapshot {
    unsigned char *bytes;
    size_t size;
} snapshot;

static inline void snapshot_add(snapshot *s, const void *p, size_t size) {
    if (!p || !size) return;
    s->bytes = (unsigned char *)realloc(s->bytes, s->size + size);
    memcpy(s->bytes + s->size, p, size);
    s->size += size;
}

/* Weights, their 16-bit copy, moments, running statistics, the count of applied steps. */
static inline snapshot snapshot_take(const mpt_trainer *t) {
    size_t params = (size_t)t->model->num_params * sizeof(float);
    snapshot s = {NULL, 0};
    snapshot_add(&s, t->masters, params);
    snapshot_add(&s, t->half, params / 2);
    snapshot_add(&s, t->first, params);
    snapshot_add(&s, t->second, params);
    snapshot_add(&s, t->running, (size_t)t->model->num_stats * sizeof(float));
    snapshot_add(&s, &t->optimizer.applied_steps, sizeof t->optimizer.applied_steps);
    return s;
}

static inline void snapshot_free(snapshot *s) {
    free(s->bytes);
    s->bytes = NULL;
    s->size = 0;
}

/* Nothing has changed since; frees the snapshot. */
static inline void snapshot_check(snapshot *before, const mpt_trainer *t) {
    snapshot now = snapshot_take(t);
    CHECK_EQ_INT(now.size, before->size);
    CHECK_EQ_MEM(now.bytes, before->bytes, now.size);
    snapshot_free(&now);
    snapshot_free(before);
}

typedef struct hash {
    char hex[65];
} hash;

static inline hash hash_of(mpt_trainer *t) {
    hash h;
    CHECK_OK(t->ctx, mpt_trainer_sha256(t, h.hex));
    CHECK_EQ_INT(strlen(h.hex), 64);
    return h;
}

static inline mpt_step_report step_of(mpt_trainer *t, const mpt_batch *b) {
    mpt_step_report r;
    CHECK_OK(t->ctx, mpt_trainer_step(t, b, &r));
    return r;
}

/* The gradient of the batch at hand, summed and still multiplied by the loss scale: row 0. The
   caller has accumulated. */
static inline const float *gradient_row(mpt_trainer *t) {
    CHECK_OK(t->ctx, mpti_trainer_reduce(t));
    return t->rows[0];
}

/* What grad_scale and the loss scale make of a gradient of the mean loss. */
static inline double gradient_factor(const mpt_trainer *t) {
    return (double)t->batch_size * t->desc.accumulate_steps /
           ((double)t->scaler.scale * (double)t->num_samples);
}

#endif /* TRAINING_H */
