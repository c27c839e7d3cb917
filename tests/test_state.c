/* test_state.c - >>state: checkpoints go on bit for bit, damaged ones are refused and change
   nothing; export and import; and every allocation on the way may fail
   Cases O-47 (flipped bytes, cut files), O-49 */
#define MPTRAIN_IMPLEMENTATION
#include "mptrain.h"

#include "mpt_test.h"
#include "training.h"

static int dropout_net(mpt_model *m) {
    int x = mpt_relu(m, mpt_batchnorm(m, net_conv(m, MPT_INPUT, 6, 3, 2, 1, 0), NULL));
    return mpt_dense(m, mpt_dropout(m, x, 0.25f), 5);
}

static int tiny_net(mpt_model *m) { /* a checkpoint of some hundred bytes */
    return mpt_dense(m, mpt_batchnorm(m, MPT_INPUT, NULL), 5);
}

static rig_desc tiny_desc(void) {
    rig_desc d = rig_small(tiny_net, 4);
    d.height = d.width = 1;
    return d;
}

/* ---- going on -------------------------------------------------------------------------------- */
typedef struct run {
    rig r;
    arrays a;
    mpt_loader *loader;
    rig_desc d;
} run;

static run run_open(rig_desc d, int workers) {
    mpt_loader_desc ld;
    run x;
    x.d = d;
    x.r = rig_open(&d);
    x.a = arrays_make(&d, 37, 1);
    ld = arrays_desc(&d, &x.a, 2);
    ld.num_workers = workers;
    ld.augment = MPT_AUGMENT_CROP_FLIP;
    x.loader = NULL;
    CHECK_OK(x.r.ctx, mpt_loader_create(x.r.ctx, &ld, &x.loader));
    return x;
}

static void run_close(run *x) {
    mpt_loader_destroy(x->loader);
    rig_close(&x->r);
    arrays_free(&x->a);
}

static void run_steps(run *x, int n) {
    int i;
    for (i = 0; i < n; i++) {
        mpt_batch b = arrays_next(x->r.ctx, x->loader);
        step_of(x->r.trainer, &b);
    }
}

/* Counters of the step and of the loss scale. */
static void check_same_counters(const mpt_trainer *a, const mpt_trainer *b) {
    CHECK_EQ_INT(a->step, b->step);
    CHECK_EQ_INT(a->optimizer.applied_steps, b->optimizer.applied_steps);
    CHECK_EQ_INT(mpti_f32_bits(a->scaler.scale), mpti_f32_bits(b->scaler.scale));
    CHECK_EQ_INT(a->scaler.good_steps, b->scaler.good_steps);
    CHECK_EQ_INT(a->scaler.skips_at_min, b->scaler.skips_at_min);
    CHECK_EQ_INT(a->scaler.num_skipped, b->scaler.num_skipped);
}

/* O-49. Eleven steps at once, against `first`, a file, and the rest in another process's place:
   other threads, other workers, a trainer of another seed. Five steps are an epoch. In FP16 the
   first scale is too large, so there are skipped steps before the file. */
static void check_goes_on(mpt_optimizer_kind kind, mpt_precision precision, int first) {
    rig_desc d = rig_small(dropout_net, 4);
    const char *path = mpt_test_tmpfile("run.state");
    snapshot expected;
    run whole, part;
    d.threads = 2;
    d.trainer.precision = precision;
    d.trainer.accumulate_steps = 2;
    d.trainer.seed = 7;
    d.trainer.optimizer.kind = kind;
    d.trainer.optimizer.learning_rate = 0.02f;
    d.trainer.optimizer.weight_decay = 1e-3f;
    d.trainer.schedule.kind = MPT_SCHEDULE_COSINE;
    d.trainer.schedule.warmup_steps = 3;
    d.trainer.total_steps = 11;
    d.trainer.loss_scaler.init_scale = 0x1p24f;
    d.trainer.loss_scaler.growth_interval = 2;
    whole = run_open(d, 1);
    run_steps(&whole, 11);
    expected = snapshot_take(whole.r.trainer);
    part = run_open(d, 2);
    run_steps(&part, first);
    CHECK_OK(part.r.ctx, mpt_trainer_save(part.r.trainer, part.loader, NULL, path));
    run_steps(&part, 1); /* saving is no end */
    run_close(&part);
    d.threads = 5;
    d.trainer.seed = 8;
    part = run_open(d, 3);
    run_steps(&part, 2); /* whatever it was before */
    CHECK_OK(part.r.ctx, mpt_trainer_load(part.r.trainer, part.loader, NULL, path));
    CHECK_EQ_INT(mpt_trainer_get_info(part.r.trainer).steps, first);
    run_steps(&part, 11 - first);
    check_same_counters(part.r.trainer, whole.r.trainer);
    if (whole.r.trainer->scaler.desc.mode == MPT_LOSS_SCALE_DYNAMIC)
        CHECK(whole.r.trainer->scaler.num_skipped > 0);
    snapshot_check(&expected, part.r.trainer);
    run_close(&part);
    run_close(&whole);
}

MPT_TEST(a_run_goes_on_bit_for_bit) {
    static const mpt_precision precisions[] = {MPT_PRECISION_FP32, MPT_PRECISION_FP16,
                                               MPT_PRECISION_BF16, MPT_PRECISION_FP16_CAST,
                                               MPT_PRECISION_FP16_PURE};
    int kind, i, first;
    for (kind = MPT_OPTIMIZER_SGD; kind <= MPT_OPTIMIZER_LARS; kind++) {
        check_goes_on((mpt_optimizer_kind)kind, MPT_PRECISION_FP32, 4);
        check_goes_on((mpt_optimizer_kind)kind, MPT_PRECISION_FP16, 6);
    }
    for (i = 0; i < COUNT(precisions); i++) check_goes_on(MPT_OPTIMIZER_DEFAULT, precisions[i], 3);
    for (first = 0; first <= 11; first++)
        check_goes_on(MPT_OPTIMIZER_ADAM, MPT_PRECISION_FP16, first);
}

MPT_TEST(the_same_state_gives_the_same_file) {
    rig_desc d = tiny_desc();
    pictures p = pictures_make(&d, 4, 1);
    mpt_batch b = pictures_batch(&p, 0, 4);
    unsigned char *first, *second;
    size_t size, again;
    rig r = rig_open(&d);
    step_of(r.trainer, &b);
    CHECK_OK(r.ctx, mpt_trainer_save(r.trainer, NULL, NULL, mpt_test_tmpfile("a")));
    CHECK_OK(r.ctx, mpt_trainer_load(r.trainer, NULL, NULL, mpt_test_tmpfile("a")));
    CHECK_OK(r.ctx, mpt_trainer_save(r.trainer, NULL, NULL, mpt_test_tmpfile("b")));
    first = mpt_test_read_file(mpt_test_tmpfile("a"), &size);
    second = mpt_test_read_file(mpt_test_tmpfile("b"), &again);
    CHECK_EQ_INT(again, size);
    CHECK_EQ_MEM(second, first, size);
    free(first);
    free(second);
    rig_close(&r);
    pictures_free(&p);
}

/* ---- what is refused ------------------------------------------------------------------------- */

/* The trainer and the loader are as they were. */
static void check_load_refused(run *x, mpt_loader *data, const char *path, mpt_result expected,
                               const char *says) {
    mpt_trainer *t = x->r.trainer;
    mpt_trainer before = *t;
    snapshot learned = snapshot_take(t);
    mpt_loader_info at = mpt_loader_get_info(x->loader), now;
    CHECK_RESULT(x->r.ctx, mpt_trainer_load(t, data, NULL, path), expected);
    CHECK_CONTAINS(mpt_last_error(x->r.ctx)->message, says);
    check_same_counters(t, &before);
    CHECK_EQ_INT(t->desc.seed, before.desc.seed);
    CHECK_EQ_INT(t->last.step, before.last.step);
    CHECK_EQ_INT(t->microbatches, before.microbatches);
    snapshot_check(&learned, t);
    now = mpt_loader_get_info(x->loader);
    CHECK(now.epoch == at.epoch && now.index == at.index);
}

static int other_stride(mpt_model *m) { /* as many parameters as dropout_net */
    int x = mpt_relu(m, mpt_batchnorm(m, net_conv(m, MPT_INPUT, 6, 3, 2, 1, 0), NULL));
    return mpt_dense(m, mpt_add(m, x, x), 5);
}

static int without_dropout(mpt_model *m) {
    int x = mpt_relu(m, mpt_batchnorm(m, net_conv(m, MPT_INPUT, 6, 3, 2, 1, 0), NULL));
    return mpt_dense(m, x, 5);
}

MPT_TEST(checkpoints_of_others_are_refused) {
    static const net_fn others[] = {other_stride, without_dropout, small_net, plain_net};
    static const char *const names[] = {"0.state", "1.state", "2.state", "3.state"};
    rig_desc d = rig_small(dropout_net, 4);
    mpt_batch b;
    run x, with_data;
    int i;
    x = run_open(d, 1);
    for (i = 0; i < COUNT(others); i++) {
        rig_desc o = rig_small(others[i], 4);
        rig r = rig_open(&o);
        CHECK_OK(r.ctx, mpt_trainer_save(r.trainer, NULL, NULL, mpt_test_tmpfile(names[i])));
        rig_close(&r);
        check_load_refused(&x, NULL, mpt_test_tmpfile(names[i]), MPT_ERR_INVALID_ARGUMENT,
                           "another model");
    }
    d.trainer.optimizer.kind = MPT_OPTIMIZER_SGD_NESTEROV; /* with moments of the same size */
    with_data = run_open(d, 1);
    CHECK_OK(with_data.r.ctx, mpt_trainer_save(with_data.r.trainer, with_data.loader, NULL,
                                               mpt_test_tmpfile("nesterov.state")));
    run_close(&with_data);
    check_load_refused(&x, x.loader, mpt_test_tmpfile("nesterov.state"), MPT_ERR_INVALID_ARGUMENT,
                       "another optimizer");
    CHECK_OK(x.r.ctx, mpt_trainer_save(x.r.trainer, NULL, NULL, mpt_test_tmpfile("x.state")));
    b = arrays_next(x.r.ctx, x.loader);
    CHECK_EQ_INT(b.num_lanes, 2);
    check_load_refused(&x, x.loader, mpt_test_tmpfile("x.state"), MPT_ERR_CORRUPT_DATA,
                       "without a position");
    check_load_refused(&x, NULL, mpt_test_tmpfile("nowhere.state"), MPT_ERR_IO, "nowhere.state");
    check_load_refused(&x, NULL, mpt_test_data("resnet20.weights.safetensors"),
                       MPT_ERR_CORRUPT_DATA, "resnet20.weights.safetensors");
    run_close(&x);
}

/* A position in other data: the loader refuses it, and the trainer stays as it was. */
MPT_TEST(positions_in_other_data_are_refused) {
    rig_desc d = rig_small(dropout_net, 4);
    mpt_loader_desc ld;
    run x = run_open(d, 1);
    arrays other = arrays_make(&d, 31, 1);
    mpt_loader *loader = NULL;
    ld = arrays_desc(&d, &other, 2);
    CHECK_OK(x.r.ctx, mpt_loader_create(x.r.ctx, &ld, &loader));
    CHECK_OK(x.r.ctx, mpt_trainer_save(x.r.trainer, loader, NULL, mpt_test_tmpfile("o.state")));
    mpt_loader_destroy(loader);
    x.r.trainer->masters[0] = 3;
    check_load_refused(&x, x.loader, mpt_test_tmpfile("o.state"), MPT_ERR_INVALID_ARGUMENT, "");
    run_close(&x);
    arrays_free(&other);
}

MPT_TEST(in_the_middle_of_a_step_nothing_is_saved) {
    rig_desc d = tiny_desc();
    pictures p = pictures_make(&d, 8, 1);
    mpt_batch b = pictures_batch(&p, 0, 4);
    mpt_step_report report;
    rig r;
    d.trainer.accumulate_steps = 2;
    r = rig_open(&d);
    CHECK_OK(r.ctx, mpt_trainer_accumulate(r.trainer, &b));
    CHECK_RESULT(r.ctx, mpt_trainer_save(r.trainer, NULL, NULL, mpt_test_tmpfile("middle")),
                 MPT_ERR_INVALID_STATE);
    CHECK_CONTAINS(mpt_last_error(r.ctx)->message, "middle of a step");
    CHECK_OK(r.ctx, mpt_trainer_apply(r.trainer, &report));
    CHECK_RESULT(r.ctx, mpt_trainer_save(r.trainer, NULL, NULL, mpt_test_tmpfile("no/where")),
                 MPT_ERR_IO);
    CHECK_CONTAINS(mpt_last_error(r.ctx)->message, "where");
    CHECK_OK(r.ctx, mpt_trainer_save(r.trainer, NULL, NULL, mpt_test_tmpfile("middle")));
    rig_close(&r);
    pictures_free(&p);
}

/* ---- a file in memory, for reading ----------------------------------------------------------- */
typedef struct memory_file {
    mpt_io io;
    const unsigned char *bytes;
    size_t size;
} memory_file;

typedef struct memory_handle {
    const memory_file *file;
    size_t at;
} memory_handle;

static mpt_result memory_open(const char *path, void **file, void *user) {
    memory_handle *h = (memory_handle *)calloc(1, sizeof *h);
    (void)path;
    h->file = (const memory_file *)user;
    *file = h;
    return MPT_OK;
}

static int64_t memory_read(void *file, void *dst, size_t size) {
    memory_handle *h = (memory_handle *)file;
    if (size > h->file->size - h->at) size = h->file->size - h->at;
    memcpy(dst, h->file->bytes + h->at, size);
    h->at += size;
    return (int64_t)size;
}

static int64_t memory_size(void *file) {
    return (int64_t)((memory_handle *)file)->file->size;
}

static mpt_result memory_seek(void *file, uint64_t offset) {
    memory_handle *h = (memory_handle *)file;
    if (offset > h->file->size) return MPT_ERR_IO;
    h->at = (size_t)offset;
    return MPT_OK;
}

static mpt_result memory_close(void *file) {
    free(file);
    return MPT_OK;
}

static const mpt_io *memory_io(memory_file *f, const unsigned char *bytes, size_t size) {
    memset(f, 0, sizeof *f);
    f->io.open = memory_open;
    f->io.read = memory_read;
    f->io.size = memory_size;
    f->io.seek = memory_seek;
    f->io.close = memory_close;
    f->io.user = f;
    f->bytes = bytes;
    f->size = size;
    return &f->io;
}

/* O-47. Each byte of a checkpoint in turn, three ways; and each length. */
typedef struct damage {
    rig r;
    snapshot before;
    int64_t accepted;
} damage;

static void try_damaged(damage *x, const unsigned char *bytes, size_t size) {
    memory_file file;
    snapshot now;
    const mpt_io *io = memory_io(&file, bytes, size);
    if (mpt_trainer_load(x->r.trainer, NULL, io, "damaged.state") == MPT_OK) x->accepted++;
    now = snapshot_take(x->r.trainer);
    CHECK_EQ_MEM(now.bytes, x->before.bytes, now.size);
    snapshot_free(&now);
}

MPT_TEST(no_flipped_byte_and_no_cut_is_accepted) {
    static const unsigned char flips[] = {0x01, 0x80, 0xff};
    rig_desc d = tiny_desc();
    pictures p = pictures_make(&d, 4, 1);
    mpt_batch b = pictures_batch(&p, 0, 4);
    unsigned char *bytes;
    memory_file file;
    size_t size, i, k;
    damage x;
    memset(&x, 0, sizeof x);
    d.trainer.optimizer.kind = MPT_OPTIMIZER_ADAM;
    x.r = rig_open(&d);
    step_of(x.r.trainer, &b);
    CHECK_OK(x.r.ctx, mpt_trainer_save(x.r.trainer, NULL, NULL, mpt_test_tmpfile("whole.state")));
    bytes = mpt_test_read_file(mpt_test_tmpfile("whole.state"), &size);
    step_of(x.r.trainer, &b); /* so that taking the file would show */
    x.before = snapshot_take(x.r.trainer);
    for (i = 0; i < size; i++)
        for (k = 0; k < sizeof flips; k++) {
            bytes[i] ^= flips[k];
            try_damaged(&x, bytes, size);
            bytes[i] ^= flips[k];
        }
    for (i = 0; i < size; i++) try_damaged(&x, bytes, i);
    CHECK_EQ_INT(x.accepted, 0);
    CHECK_OK(x.r.ctx,
             mpt_trainer_load(x.r.trainer, NULL, memory_io(&file, bytes, size), "whole.state"));
    snapshot_free(&x.before);
    free(bytes);
    rig_close(&x.r);
    pictures_free(&p);
}

/* ---- hostile checkpoints: checksums are right, numbers are not ------------------------------- */

/* Copies a checkpoint with other counters; drop: the tensor left out. */
static void forge(mpt_ctx *ctx, const char *from, const char *to, int counter, int64_t value,
                  const char *drop) {
    mpt_safetensors_desc sd;
    mpt_safetensors_writer_desc wd;
    mpt_safetensors *s = NULL;
    mpt_safetensors_writer *w = NULL;
    mpt_safetensors_info info;
    void *data[8];
    int64_t i, n;
    memset(&sd, 0, sizeof sd);
    memset(&wd, 0, sizeof wd);
    sd.path = from;
    wd.path = to;
    wd.checksum = 1;
    CHECK_OK(ctx, mpt_safetensors_open(ctx, &sd, &s));
    CHECK_OK(ctx, mpt_safetensors_writer_open(ctx, &wd, &w));
    n = mpt_safetensors_count(s);
    for (i = 0; i < n; i++) {
        mpt_tensor t;
        CHECK_OK(ctx, mpt_safetensors_get(s, i, &info));
        data[i] = malloc((size_t)info.bytes);
        CHECK_OK(ctx, mpt_safetensors_read(s, i, data[i], (size_t)info.bytes));
        if (!strcmp(info.name, "mptrain.counters") && counter >= 0)
            ((int64_t *)data[i])[counter] = value;
        memset(&t, 0, sizeof t);
        t.data = data[i];
        t.dtype = info.dtype;
        t.num_dims = 1;
        t.dims[0] = info.dims[0];
        if (!drop || strcmp(info.name, drop))
            CHECK_OK(ctx, mpt_safetensors_writer_add(w, info.name, &t));
    }
    CHECK_OK(ctx, mpt_safetensors_writer_add_metadata(w, "mptrain.checkpoint", "1"));
    CHECK_OK(ctx, mpt_safetensors_writer_finish(w));
    mpt_safetensors_writer_close(w);
    mpt_safetensors_close(s);
    for (i = 0; i < n; i++) free(data[i]);
}

MPT_TEST(forged_numbers_are_refused) {
    static const struct {
        int counter;
        int64_t value;
    } forged[] = {
        {0, -1},         {0, INT64_MIN},  {1, -5}, {1, 1 << 20}, {2, -1},         {2, 1ll << 40},
        {3, -1},         {3, 1ll << 40},  {4, -1}, {5, 0},       {5, 0x7f800000}, {5, 0x7fc00000},
        {5, 0xbf800000}, {5, 0x80000000}, {6, 5},  {8, 99},
    };
    static const char *const names[] = {"mptrain.counters", "mptrain.weights",
                                        "mptrain.first_moment", "mptrain.second_moment",
                                        "mptrain.running"};
    rig_desc d = rig_small(dropout_net, 4);
    char good[1024], bad[1024];
    run x;
    int i;
    d.trainer.optimizer.kind = MPT_OPTIMIZER_ADAM;
    d.trainer.precision = MPT_PRECISION_FP16;
    d.trainer.accumulate_steps = 2;
    x = run_open(d, 1);
    run_steps(&x, 2);
    snprintf(good, sizeof good, "%s", mpt_test_tmpfile("good.state"));
    snprintf(bad, sizeof bad, "%s", mpt_test_tmpfile("bad.state"));
    CHECK_OK(x.r.ctx, mpt_trainer_save(x.r.trainer, NULL, NULL, good));
    run_steps(&x, 1);
    for (i = 0; i < COUNT(forged); i++) {
        mpt_result rc = forged[i].counter == 6 || forged[i].counter == 8 ? MPT_ERR_INVALID_ARGUMENT
                                                                         : MPT_ERR_CORRUPT_DATA;
        forge(x.r.ctx, good, bad, forged[i].counter, forged[i].value, NULL);
        check_load_refused(&x, NULL, bad, rc, "bad.state");
    }
    for (i = 0; i < COUNT(names); i++) {
        forge(x.r.ctx, good, bad, -1, 0, names[i]);
        check_load_refused(&x, NULL, bad, MPT_ERR_CORRUPT_DATA, names[i]);
    }
    forge(x.r.ctx, good, bad, -1, 0, NULL); /* forging as such is no fault */
    CHECK_OK(x.r.ctx, mpt_trainer_load(x.r.trainer, NULL, NULL, bad));
    run_close(&x);
}

/* ---- export and import ----------------------------------------------------------------------- */
static void export_to(rig *r, const char *path) {
    mpt_export_desc d;
    memset(&d, 0, sizeof d);
    d.path = path;
    CHECK_OK(r->ctx, mpt_trainer_export(r->trainer, &d));
}

static int torch_net(mpt_model *m) { /* a convolution, and a dense layer behind a picture */
    int x = mpt_name(m, net_conv(m, MPT_INPUT, 4, 3, 1, 1, 1), "conv");
    return mpt_name(m, mpt_dense(m, mpt_max_pool(m, x, 2, 2, 0), 5), "fc");
}

static float *read_tensor(mpt_ctx *ctx, mpt_safetensors *s, const char *name, size_t count) {
    float *data = (float *)malloc(count * sizeof *data);
    int64_t i = mpt_safetensors_find(s, name);
    CHECK(i >= 0);
    CHECK_OK(ctx, mpt_safetensors_read(s, i, data, count * sizeof *data));
    return data;
}

/* (K,R,S,C) -> (K,C,R,S), (out, h w c) -> (out, c h w), element by element. */
MPT_TEST(exports_have_the_layout_of_pytorch) {
    rig_desc d = rig_small(torch_net, 4);
    mpt_metadata pairs[2] = {{"arch", "torch_net"}, {"labels", "five"}};
    mpt_export_desc export;
    mpt_safetensors_desc sd;
    mpt_safetensors *s = NULL;
    const float *w;
    float *conv, *fc;
    int k, c, y, x;
    rig r = rig_open(&d);
    memset(&export, 0, sizeof export);
    export.path = mpt_test_tmpfile("torch.safetensors");
    export.metadata = pairs;
    export.num_metadata = 2;
    CHECK_OK(r.ctx, mpt_trainer_export(r.trainer, &export));
    memset(&sd, 0, sizeof sd);
    sd.path = export.path;
    CHECK_OK(r.ctx, mpt_safetensors_open(r.ctx, &sd, &s));
    CHECK_EQ_INT(mpt_safetensors_count(s), 4);
    CHECK_EQ_STR(mpt_safetensors_metadata(s, "format"), "pt");
    CHECK_EQ_STR(mpt_safetensors_metadata(s, "arch"), "torch_net");
    CHECK_EQ_STR(mpt_safetensors_metadata(s, "labels"), "five");
    conv = read_tensor(r.ctx, s, "conv.weight", 4 * 3 * 3 * 3);
    fc = read_tensor(r.ctx, s, "fc.weight", 5 * 4 * 4 * 4);
    w = r.trainer->masters;
    for (k = 0; k < 4; k++)
        for (c = 0; c < 3; c++)
            for (y = 0; y < 3; y++)
                for (x = 0; x < 3; x++)
                    CHECK(conv[((k * 3 + c) * 3 + y) * 3 + x] == w[((k * 3 + y) * 3 + x) * 3 + c]);
    w += 4 * 27 + 4;
    for (k = 0; k < 5; k++)
        for (c = 0; c < 4; c++)
            for (y = 0; y < 4; y++)
                for (x = 0; x < 4; x++)
                    CHECK(fc[((k * 4 + c) * 4 + y) * 4 + x] == w[((k * 4 + y) * 4 + x) * 4 + c]);
    free(conv);
    free(fc);
    mpt_safetensors_close(s);
    rig_close(&r);
}

MPT_TEST(what_is_exported_comes_back) {
    static const mpt_precision precisions[] = {MPT_PRECISION_FP32, MPT_PRECISION_FP16,
                                               MPT_PRECISION_FP16_PURE, MPT_PRECISION_BF16};
    int i;
    for (i = 0; i < COUNT(precisions); i++) {
        rig_desc d = rig_small(small_net, 4);
        pictures p = pictures_make(&d, 4, 1);
        mpt_batch b = pictures_batch(&p, 0, 4);
        float before[20], after[20];
        hash exported, imported;
        rig r;
        d.trainer.precision = precisions[i];
        d.trainer.loss_scaler.init_scale = 64;
        r = rig_open(&d);
        step_of(r.trainer, &b);
        step_of(r.trainer, &b);
        exported = hash_of(r.trainer);
        CHECK_OK(r.ctx, mpt_predict(r.trainer, &b, before));
        export_to(&r, mpt_test_tmpfile("round.safetensors"));
        rig_close(&r);
        d.trainer.seed = 99;
        r = rig_open(&d);
        CHECK_OK(r.ctx, mpt_trainer_import(r.trainer, NULL, mpt_test_tmpfile("round.safetensors")));
        imported = hash_of(r.trainer);
        CHECK_EQ_STR(imported.hex, exported.hex);
        CHECK_OK(r.ctx, mpt_predict(r.trainer, &b, after)); /* the 16-bit copy has followed */
        CHECK_EQ_MEM(after, before, sizeof before);
        CHECK_EQ_INT(mpt_trainer_get_info(r.trainer).steps, 0);
        rig_close(&r);
        pictures_free(&p);
    }
}

/* Writes r's export anew with one thing changed. */
typedef struct change {
    const char *name;          /* of the tensor */
    int drop, flatten, append; /* left out; one dimension; and one more tensor beside it */
    mpt_dtype dtype;           /* claimed for the same bytes */
} change;

static void write_changed(mpt_ctx *ctx, const char *from, const char *to, const change *c) {
    mpt_safetensors_desc sd;
    mpt_safetensors_writer_desc wd;
    mpt_safetensors *s = NULL;
    mpt_safetensors_writer *w = NULL;
    mpt_safetensors_info info;
    void *data[64];
    int64_t i, n;
    memset(&sd, 0, sizeof sd);
    memset(&wd, 0, sizeof wd);
    sd.path = from;
    wd.path = to;
    CHECK_OK(ctx, mpt_safetensors_open(ctx, &sd, &s));
    CHECK_OK(ctx, mpt_safetensors_writer_open(ctx, &wd, &w));
    n = mpt_safetensors_count(s);
    for (i = 0; i < n; i++) {
        mpt_tensor t;
        CHECK_OK(ctx, mpt_safetensors_get(s, i, &info));
        data[i] = malloc((size_t)info.bytes);
        CHECK_OK(ctx, mpt_safetensors_read(s, i, data[i], (size_t)info.bytes));
        memset(&t, 0, sizeof t);
        t.data = data[i];
        t.dtype = info.dtype;
        t.num_dims = info.num_dims;
        memcpy(t.dims, info.dims, sizeof t.dims);
        if (!strcmp(info.name, c->name)) {
            if (c->drop) continue;
            t.dtype = c->dtype;
            if (c->flatten) t.num_dims = 1;
            if (c->flatten) t.dims[0] = (int64_t)info.count;
            if (c->append) CHECK_OK(ctx, mpt_safetensors_writer_add(w, "one.more", &t));
        }
        CHECK_OK(ctx, mpt_safetensors_writer_add(w, info.name, &t));
    }
    CHECK_OK(ctx, mpt_safetensors_writer_finish(w));
    mpt_safetensors_writer_close(w);
    mpt_safetensors_close(s);
    for (i = 0; i < n; i++) free(data[i]);
}

MPT_TEST(imports_that_do_not_fit_are_refused_by_tensor) {
    static const change refused[] = {
        {"dense0.weight", 1, 0, 0, MPT_F32},  {"batchnorm1.running_var", 1, 0, 0, MPT_F32},
        {"conv2d2.weight", 0, 1, 0, MPT_F32}, {"dense0.bias", 0, 0, 0, MPT_I32},
        {"conv2d0.weight", 1, 0, 0, MPT_F32},
    };
    static const change taken[] = {
        {"dense0.weight", 0, 0, 1, MPT_F32},
        {"batchnorm0.num_batches_tracked", 1, 0, 0, MPT_I64}, /* older files have none */
    };
    rig_desc d = rig_small(small_net, 4);
    char good[1024], changed[1024];
    rig r = rig_open(&d);
    hash exported = hash_of(r.trainer), imported;
    snapshot before;
    int i;
    snprintf(good, sizeof good, "%s", mpt_test_tmpfile("good.safetensors"));
    snprintf(changed, sizeof changed, "%s", mpt_test_tmpfile("changed.safetensors"));
    export_to(&r, good);
    rig_close(&r);
    d.trainer.seed = 3;
    r = rig_open(&d);
    for (i = 0; i < COUNT(refused); i++) {
        write_changed(r.ctx, good, changed, &refused[i]);
        before = snapshot_take(r.trainer);
        CHECK_RESULT(r.ctx, mpt_trainer_import(r.trainer, NULL, changed), MPT_ERR_CORRUPT_DATA);
        CHECK_CONTAINS(mpt_last_error(r.ctx)->message, refused[i].name);
        CHECK_CONTAINS(mpt_last_error(r.ctx)->message, "changed.safetensors");
        snapshot_check(&before, r.trainer);
    }
    for (i = 0; i < COUNT(taken); i++) {
        write_changed(r.ctx, good, changed, &taken[i]);
        memset(r.trainer->masters, 0, 64);
        CHECK_OK(r.ctx, mpt_trainer_import(r.trainer, NULL, changed));
        imported = hash_of(r.trainer);
        CHECK_EQ_STR(imported.hex, exported.hex);
    }
    CHECK_RESULT(r.ctx, mpt_trainer_import(r.trainer, NULL, mpt_test_tmpfile("nowhere")),
                 MPT_ERR_IO);
    CHECK_EQ_INT(mpt_trainer_import(r.trainer, NULL, NULL), MPT_ERR_INVALID_ARGUMENT);
    CHECK_EQ_INT(mpt_trainer_export(r.trainer, NULL), MPT_ERR_INVALID_ARGUMENT);
    CHECK_EQ_INT(mpt_trainer_load(r.trainer, NULL, NULL, NULL), MPT_ERR_INVALID_ARGUMENT);
    CHECK_EQ_INT(mpt_trainer_save(NULL, NULL, NULL, good), MPT_ERR_INVALID_ARGUMENT);
    CHECK_EQ_INT(mpt_trainer_sha256(NULL, imported.hex), MPT_ERR_INVALID_ARGUMENT);
    rig_close(&r);
}

/* ---- what is logged -------------------------------------------------------------------------- */
typedef struct warnings {
    int count;
    char last[512];
} warnings;

static void keep_warning(int level, const char *message, void *user) {
    warnings *w = (warnings *)user;
    if (level != MPT_LOG_WARNING) return;
    w->count++;
    snprintf(w->last, sizeof w->last, "%s", message);
}

/* Another batch size or schedule is the caller's right, and often a slip. */
MPT_TEST(another_batch_or_schedule_is_warned_of) {
    static const int changes[][3] = {{4, 1, 100}, {2, 2, 100}, {4, 2, 100}, {4, 1, 90}, {8, 1, 50}};
    static const int expected[] = {0, 0, 1, 1, 2};
    static const char *const says[] = {"", "", "4 records a step, this run takes 8",
                                       "ran to step 100, this one runs to 90", "50"};
    rig_desc d = tiny_desc();
    warnings w;
    rig r;
    int i;
    d.trainer.total_steps = 100;
    d.trainer.schedule.kind = MPT_SCHEDULE_COSINE;
    r = rig_open(&d);
    CHECK_OK(r.ctx, mpt_trainer_save(r.trainer, NULL, NULL, mpt_test_tmpfile("warned.state")));
    rig_close(&r);
    for (i = 0; i < COUNT(changes); i++) {
        d.batch_size = changes[i][0];
        d.trainer.accumulate_steps = changes[i][1];
        d.trainer.total_steps = changes[i][2];
        r = rig_open(&d);
        memset(&w, 0, sizeof w);
        r.ctx->desc.logger.log = keep_warning;
        r.ctx->desc.logger.user = &w;
        CHECK_OK(r.ctx, mpt_trainer_load(r.trainer, NULL, NULL, mpt_test_tmpfile("warned.state")));
        CHECK_EQ_INT(w.count, expected[i]);
        CHECK_CONTAINS(w.last, says[i]);
        rig_close(&r);
    }
}

static void count_line(int level, const char *message, void *user) {
    if (level == MPT_LOG_ERROR && message[0]) ++*(int *)user;
}

/* Some of these calls go through others that report errors too. */
MPT_TEST(each_error_is_logged_once) {
    rig_desc d = tiny_desc();
    pictures p = pictures_make(&d, 8, 1);
    mpt_batch b = pictures_batch(&p, 0, 5);
    mpt_step_report report;
    mpt_export_desc export;
    int lines = 0, expected = 0;
    rig r = rig_open(&d);
    r.ctx->desc.logger.log = count_line;
    r.ctx->desc.logger.user = &lines;
    memset(&export, 0, sizeof export);
    export.path = mpt_test_tmpfile("no/where");
#define LOGGED_ONCE(call) \
    do { \
        CHECK((call) < 0); \
        CHECK_EQ_INT(lines, ++expected); \
    } while (0)
    LOGGED_ONCE(mpt_trainer_step(r.trainer, &b, &report));
    LOGGED_ONCE(mpt_trainer_apply(r.trainer, &report));
    LOGGED_ONCE(mpt_trainer_load(r.trainer, NULL, NULL, mpt_test_tmpfile("nowhere")));
    LOGGED_ONCE(mpt_trainer_load(r.trainer, NULL, NULL, mpt_test_data("examples.txt")));
    LOGGED_ONCE(mpt_trainer_import(r.trainer, NULL, mpt_test_tmpfile("nowhere")));
    LOGGED_ONCE(mpt_trainer_import(r.trainer, NULL, mpt_test_data("layers.safetensors")));
    LOGGED_ONCE(mpt_trainer_export(r.trainer, &export));
    LOGGED_ONCE(mpt_trainer_save(r.trainer, NULL, NULL, export.path));
    LOGGED_ONCE(mpt_trainer_step(r.trainer, &b, &report));
#undef LOGGED_ONCE
    rig_close(&r);
    pictures_free(&p);
}

/* ---- no memory ------------------------------------------------------------------------------- */

/* All that a program does. Returns the result of the first call that fails, which is *where. */
static mpt_result whole_life(const rig_desc *d, rig *r, mpt_loader **loader, const arrays *a,
                             const char **where) {
    mpt_loader_desc ld = arrays_desc(d, a, 1);
    mpt_step_report report;
    mpt_export_desc export;
    mpt_metrics metrics;
    mpt_batch b;
    mpt_result rc;
    int x;
    memset(&export, 0, sizeof export);
    export.path = mpt_test_tmpfile("life.safetensors");
#define CALL(call) \
    do { \
        *where = #call; \
        if ((rc = (call)) != MPT_OK) return rc; \
    } while (0)
    CALL(mpt_model_create(r->ctx, d->height, d->width, d->channels, &r->model));
    x = d->net(r->model);
    CALL(mpt_model_finish(r->model, x));
    CALL(mpt_trainer_create(r->model, &d->trainer, d->batch_size, &r->trainer));
    CALL(mpt_loader_create(r->ctx, &ld, loader));
    CALL(mpt_loader_next(*loader, &b));
    CALL(mpt_trainer_step(r->trainer, &b, &report));
    CALL(mpt_loader_next(*loader, &b));
    CALL(mpt_trainer_step(r->trainer, &b, &report));
    CALL(mpt_trainer_save(r->trainer, *loader, NULL, mpt_test_tmpfile("life.state")));
    CALL(mpt_trainer_load(r->trainer, *loader, NULL, mpt_test_tmpfile("life.state")));
    CALL(mpt_trainer_export(r->trainer, &export));
    CALL(mpt_trainer_import(r->trainer, NULL, export.path));
    CALL(mpt_evaluate(r->trainer, *loader, &metrics));
#undef CALL
    return MPT_OK;
}

/* With the n-th allocation failing, once or from there on: one error, no crash, no leak. */
static int life_with_failure(const rig_desc *given, const arrays *a, int64_t n, int from_there) {
    rig_desc d = *given;
    mpt_test_allocator memory;
    mpt_loader *loader = NULL;
    const char *where = "";
    mpt_result rc;
    rig r;
    mpt_test_allocator_init(&memory, 0, from_there);
    d.allocator = &memory.hooks;
    memset(&r, 0, sizeof r);
    r.ctx = rig_ctx(&d);
    memory.fail_at = n ? memory.num_allocs + n : 0;
    rc = whole_life(&d, &r, &loader, a, &where);
    if (memory.has_failed ? rc != MPT_ERR_OUT_OF_MEMORY : rc != MPT_OK)
        mpt_test_fail(__FILE__, __LINE__, "allocation %lld: %s gives %s: %s", (long long)n, where,
                      mpt_result_string(rc), mpt_last_error(r.ctx)->message);
    if (rc) CHECK(strstr(mpt_last_error(r.ctx)->message, "memory") != NULL);
    mpt_loader_destroy(loader);
    rig_close(&r);
    CHECK_NO_LEAK(&memory);
    return memory.has_failed;
}

MPT_TEST(every_allocation_may_fail) {
    rig_desc d = rig_small(dropout_net, 4);
    arrays a = arrays_make(&d, 12, 1);
    int64_t n, step = mpt_test_full() ? 1 : 5;
    int from_there;
    d.threads = 2;
    d.trainer.precision = MPT_PRECISION_FP16;
    d.trainer.optimizer.kind = MPT_OPTIMIZER_ADAM;
    for (from_there = 0; from_there < 2; from_there++) {
        for (n = 1 + 2 * from_there; life_with_failure(&d, &a, n, from_there); n += step) continue;
        CHECK(n > 40);
    }
    arrays_free(&a);
}

/* What failed for want of memory succeeds with it, and the trainer has not changed in between. */
MPT_TEST(after_a_failure_the_trainer_goes_on) {
    rig_desc d = rig_small(dropout_net, 4);
    pictures p = pictures_make(&d, 4, 1);
    mpt_batch b = pictures_batch(&p, 0, 4);
    mpt_test_allocator memory;
    mpt_export_desc export;
    char path[1024];
    snapshot before;
    int call, n;
    rig r;
    mpt_test_allocator_init(&memory, 0, 0);
    d.allocator = &memory.hooks;
    memset(&export, 0, sizeof export);
    snprintf(path, sizeof path, "%s", mpt_test_tmpfile("again"));
    export.path = path;
    r = rig_open(&d);
    step_of(r.trainer, &b);
    for (call = 0; call < 4; call++)
        for (n = 1;; n++) {
            mpt_result rc = MPT_OK;
            before = snapshot_take(r.trainer);
            memory.has_failed = 0;
            memory.fail_at = memory.num_allocs + n;
            if (call == 0) rc = mpt_trainer_save(r.trainer, NULL, NULL, path);
            if (call == 1) rc = mpt_trainer_load(r.trainer, NULL, NULL, path);
            if (call == 2) rc = mpt_trainer_export(r.trainer, &export);
            if (call == 3) rc = mpt_trainer_import(r.trainer, NULL, path);
            memory.fail_at = 0;
            CHECK_EQ_INT(rc, memory.has_failed ? MPT_ERR_OUT_OF_MEMORY : MPT_OK);
            snapshot_check(&before, r.trainer);
            if (!memory.has_failed) break;
        }
    CHECK(!step_of(r.trainer, &b).skipped);
    rig_close(&r);
    CHECK_NO_LEAK(&memory);
    pictures_free(&p);
}

static const mpt_test_case tests[] = {
    MPT_TEST_CASE(a_run_goes_on_bit_for_bit),
    MPT_TEST_CASE(the_same_state_gives_the_same_file),
    MPT_TEST_CASE(checkpoints_of_others_are_refused),
    MPT_TEST_CASE(positions_in_other_data_are_refused),
    MPT_TEST_CASE(in_the_middle_of_a_step_nothing_is_saved),
    MPT_TEST_CASE(no_flipped_byte_and_no_cut_is_accepted),
    MPT_TEST_CASE(forged_numbers_are_refused),
    MPT_TEST_CASE(exports_have_the_layout_of_pytorch),
    MPT_TEST_CASE(what_is_exported_comes_back),
    MPT_TEST_CASE(imports_that_do_not_fit_are_refused_by_tensor),
    MPT_TEST_CASE(another_batch_or_schedule_is_warned_of),
    MPT_TEST_CASE(each_error_is_logged_once),
    MPT_TEST_CASE(every_allocation_may_fail),
    MPT_TEST_CASE(after_a_failure_the_trainer_goes_on),
};

int main(int argc, char **argv) {
    return mpt_test_main(argc, argv, tests, sizeof(tests) / sizeof(tests[0]));
}
