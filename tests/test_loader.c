/* test_loader.c - >>loader: from shards to batches. Every record once, in an order that depends on
   the seed alone; damaged data never silent; each stop joins its threads and closes its files.

   Most data sets here are made of tiny raw pictures (2 x 2 gray) whose four pixels spell the
   record's number, so that a batch tells which records are in it. */
#define MPT_ASSERT(condition) ((condition) ? (void)0 : abort())
#define MPTRAIN_IMPLEMENTATION
#include "mptrain.h"

#include "mpt_test.h"

#include <sys/resource.h>
#include <sys/time.h>

enum { MAX_IDS = 8192, NUM_CLASSES = 10 };

#if defined(__has_feature)
#define HAS_FEATURE(name) __has_feature(name)
#else
#define HAS_FEATURE(name) 0
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || \
    HAS_FEATURE(address_sanitizer) || HAS_FEATURE(thread_sanitizer)
enum { SANITIZED = 1 };
#else
enum { SANITIZED = 0 };
#endif

/* ---- data sets
   ----------------------------------------------------------------------------------*/
static mpt_ctx *new_ctx(void) {
    mpt_ctx *ctx = NULL;
    CHECK_OK(NULL, mpt_ctx_create(NULL, &ctx));
    return ctx;
}

static mpt_tfrecord_writer *open_writer(mpt_ctx *ctx, const char *path,
                                        mpt_compression compression) {
    mpt_tfrecord_writer_desc desc;
    mpt_tfrecord_writer *w = NULL;
    memset(&desc, 0, sizeof desc);
    desc.path = path;
    desc.compression = compression;
    CHECK_OK(ctx, mpt_tfrecord_writer_open(ctx, &desc, &w));
    return w;
}

static void write_example(mpt_ctx *ctx, mpt_tfrecord_writer *w, mpt_example *e) {
    mpt_bytes encoded;
    CHECK_OK(ctx, mpt_example_encode(e, &encoded));
    CHECK_OK(ctx, mpt_tfrecord_writer_write(w, encoded));
    mpt_example_clear(e);
}

static void add_sample(mpt_ctx *ctx, mpt_example *e, int id, const char *image_key,
                       const char *label_key, int64_t label) {
    uint8_t pixels[4];
    mpt_bytes value;
    int i;
    for (i = 0; i < 4; i++) pixels[i] = (uint8_t)(id >> 8 * i);
    value.data = pixels;
    value.size = sizeof pixels;
    CHECK_OK(ctx, mpt_example_add_bytes(e, image_key, &value, 1));
    CHECK_OK(ctx, mpt_example_add_int64s(e, label_key, &label, 1));
}

/* Shard with records first .. first+n-1 under TFDS keys; label = id % 10. */
static void write_shard(mpt_ctx *ctx, const char *path, int first, int n,
                        mpt_compression compression) {
    mpt_tfrecord_writer *w = open_writer(ctx, path, compression);
    mpt_example *e = NULL;
    int i;
    CHECK_OK(ctx, mpt_example_create(ctx, &e));
    for (i = first; i < first + n; i++) {
        add_sample(ctx, e, i, "image", "label", i % NUM_CLASSES);
        write_example(ctx, w, e);
    }
    mpt_example_destroy(e);
    CHECK_OK(ctx, mpt_tfrecord_writer_finish(w));
    mpt_tfrecord_writer_close(w);
}

/* A folder of its own below the temporary one. */
static const char *new_folder(const char *name) {
    const char *path = mpt_test_tmpfile(name);
    mpt_test_remove_tree(path);
    CHECK(mkdir(path, 0777) == 0);
    return path;
}

/* NAME/tfrecord-0000i-of-0000n with the given numbers of records; ids run on. Returns the total. */
static int write_set(mpt_ctx *ctx, const char *folder, const int *counts, int n,
                     mpt_compression compression) {
    int total = 0, i;
    for (i = 0; i < n; i++) {
        char path[1200];
        snprintf(path, sizeof path, "%s/tfrecord-%05d-of-%05d", folder, i, n);
        write_shard(ctx, path, total, counts[i], compression);
        total += counts[i];
    }
    return total;
}

static mpt_loader_desc raw_desc(const char *const *paths, int num_paths) {
    mpt_loader_desc d;
    memset(&d, 0, sizeof d);
    d.paths = paths;
    d.num_paths = num_paths;
    d.height = d.width = 2;
    d.channels = 1;
    d.num_classes = NUM_CLASSES;
    d.raw_pixels = 1;
    d.dtype = MPT_U8;
    d.batch_size = 8;
    d.shuffle_buffer = 16;
    d.num_workers = 2;
    d.seed = 7;
    return d;
}

/* ---- what came out ------------------------------------------------------------------------------
   */
typedef struct trace {
    int ids[MAX_IDS]; /* in order of delivery; -2 marks the end of a lane's part, -3 of a batch */
    int n;
    int records;
} trace;

static int id_of(const uint8_t *p) {
    return p[0] | p[1] << 8 | p[2] << 16 | p[3] << 24;
}

static void trace_batch(trace *t, const mpt_batch *b) {
    int capacity = (int)(b->images.dims[0] / b->num_lanes), lane, i;
    CHECK(b->num_valid > 0);
    for (lane = 0; lane < b->num_lanes; lane++) {
        for (i = 0; i < capacity; i++) {
            int slot = lane * capacity + i;
            int32_t label = ((const int32_t *)b->labels.data)[slot];
            int id = id_of((const uint8_t *)b->images.data + slot * 4);
            if (i >= b->lane_valid[lane]) {
                CHECK_EQ_INT(label, -1);
                continue;
            }
            CHECK_EQ_INT(label, id % NUM_CLASSES);
            CHECK(t->n + 3 < MAX_IDS);
            t->ids[t->n++] = id;
            t->records++;
        }
        t->ids[t->n++] = -2;
    }
    t->ids[t->n++] = -3;
}

/* The rest of an epoch. */
static void run_epoch(mpt_ctx *ctx, mpt_loader *ld, trace *t) {
    mpt_batch b;
    mpt_result rc;
    while ((rc = mpt_loader_next(ld, &b)) == MPT_OK) trace_batch(t, &b);
    CHECK_RESULT(ctx, rc, MPT_END);
}

static void run_epochs(const mpt_loader_desc *desc, int epochs, trace *t) {
    mpt_ctx *ctx = new_ctx();
    mpt_loader *ld = NULL;
    memset(t, 0, sizeof *t);
    CHECK_OK(ctx, mpt_loader_create(ctx, desc, &ld));
    while (epochs-- > 0) run_epoch(ctx, ld, t);
    mpt_loader_destroy(ld);
    mpt_ctx_destroy(ctx);
}

static void check_same(const trace *a, const trace *b) {
    CHECK_EQ_INT(a->n, b->n);
    CHECK_EQ_MEM(a->ids, b->ids, sizeof a->ids[0] * (size_t)a->n);
}

/* Each of 0 .. total-1 exactly `times` times, nothing else. */
static void check_each(const trace *t, int total, int times) {
    static int seen[MAX_IDS];
    int i;
    memset(seen, 0, sizeof seen);
    for (i = 0; i < t->n; i++)
        if (t->ids[i] >= 0) {
            CHECK(t->ids[i] < total);
            seen[t->ids[i]]++;
        }
    for (i = 0; i < total; i++) CHECK_EQ_INT(seen[i], times);
}

static int count_open_files(void) {
    DIR *d = opendir("/proc/self/fd");
    int n = 0;
    if (!d) return -1;
    while (readdir(d)) n++;
    closedir(d);
    return n;
}

static int count_threads(void) {
    DIR *d = opendir("/proc/self/task");
    int n = -2; /* . and .. */
    if (!d) return -1;
    while (readdir(d)) n++;
    closedir(d);
    return n;
}

/* The error in which reading a data set ends. */
static const char *error_of(mpt_ctx *ctx, const mpt_loader_desc *desc, mpt_result expected) {
    mpt_loader *ld = NULL;
    mpt_batch b;
    mpt_result rc = mpt_loader_create(ctx, desc, &ld);
    while (rc == MPT_OK) rc = mpt_loader_next(ld, &b);
    mpt_loader_destroy(ld);
    CHECK_RESULT(ctx, rc, expected);
    return mpt_last_error(ctx)->message;
}

/* ---- each record once ---------------------------------------------------------------------------
   */
MPT_TEST(O22_each_record_once_whatever_the_workers) {
    static const int counts[5] = {7, 7, 7, 7, 7}, workers[6] = {0, 1, 2, 3, 8, 16};
    static trace first, t;
    mpt_ctx *ctx = new_ctx();
    const char *folder = new_folder("o22");
    mpt_loader_desc d = raw_desc(&folder, 1);
    int i;
    CHECK_EQ_INT(write_set(ctx, folder, counts, 5, MPT_COMPRESSION_NONE), 35);
    for (i = 0; i < 6; i++) {
        d.num_workers = workers[i];
        run_epochs(&d, 2, &t);
        check_each(&t, 35, 2);
        if (i == 0) first = t;
        check_same(&first, &t);
    }
    mpt_ctx_destroy(ctx);
}

static void check_every_layout(mpt_compression compression) {
    static const int counts[4] = {37, 40, 1, 22}, lanes[4] = {1, 2, 4, 7}, batches[3] = {1, 8, 64};
    static trace t;
    mpt_ctx *ctx = new_ctx();
    const char *folder = new_folder("layouts");
    mpt_loader_desc d = raw_desc(&folder, 1);
    int i, k, shuffled;
    write_set(ctx, folder, counts, 4, compression);
    for (i = 0; i < 4; i++)
        for (k = 0; k < 3; k++)
            for (shuffled = 0; shuffled < 2; shuffled++) {
                d.num_lanes = lanes[i];
                d.batch_size = batches[k];
                d.no_shuffle = !shuffled;
                run_epochs(&d, 2, &t);
                check_each(&t, 100, 2);
            }
    mpt_ctx_destroy(ctx);
}

MPT_TEST(O22_each_record_once_whatever_the_lanes) {
    check_every_layout(MPT_COMPRESSION_NONE);
#ifdef MPTRAIN_ZLIB
    check_every_layout(MPT_COMPRESSION_GZIP);
    check_every_layout(MPT_COMPRESSION_ZLIB);
#endif
}

MPT_TEST(whole_files_are_dealt_when_there_are_many) {
    static int counts[40];
    static trace t;
    mpt_ctx *ctx = new_ctx();
    const char *folder = new_folder("many");
    mpt_loader_desc d = raw_desc(&folder, 1);
    mpt_loader *ld = NULL;
    int i, total;
    for (i = 0; i < 40; i++) counts[i] = 1 + i % 4;
    total = write_set(ctx, folder, counts, 40, MPT_COMPRESSION_NONE);
    d.num_lanes = 2; /* 20 files each */
    run_epochs(&d, 3, &t);
    check_each(&t, total, 3);
    CHECK_OK(ctx, mpt_loader_create(ctx, &d, &ld));
    for (i = 0; i < ld->lanes[0].num_segments; i++)
        CHECK_EQ_INT(ld->lanes[0].segments[i].count, -1);
    CHECK_EQ_INT(ld->lanes[0].num_segments, 20);
    mpt_loader_destroy(ld);
    mpt_ctx_destroy(ctx);
}

/* Lane l's records, batch after batch, as one row. */
static void lane_of(const trace *t, int lanes, int lane, trace *out) {
    int at = 0, i;
    memset(out, 0, sizeof *out);
    for (i = 0; i < t->n; i++) {
        if (t->ids[i] == -2) at++;
        else if (t->ids[i] >= 0 && at % lanes == lane) out->ids[out->n++] = t->ids[i];
    }
}

static void check_lanes_by_rank(mpt_compression compression, int num_files) {
    static int counts[80];
    static trace all, part, a, b;
    mpt_ctx *ctx = new_ctx();
    const char *folder = new_folder("ranks");
    mpt_loader_desc d = raw_desc(&folder, 1);
    int world, rank, lane, i;
    for (i = 0; i < num_files; i++) counts[i] = 3 + i % 5;
    write_set(ctx, folder, counts, num_files, compression);
    d.num_lanes = 4;
    run_epochs(&d, 2, &all);
    for (world = 2; world <= 4; world *= 2)
        for (rank = 0; rank < world; rank++) {
            mpt_loader_desc mine = d;
            int owned = 4 / world;
            mine.rank = rank;
            mine.world_size = world;
            run_epochs(&mine, 2, &part);
            for (lane = 0; lane < owned; lane++) {
                lane_of(&all, 4, rank * owned + lane, &a);
                lane_of(&part, owned, lane, &b);
                check_same(&a, &b);
            }
        }
    mpt_ctx_destroy(ctx);
}

MPT_TEST(lanes_are_the_same_for_1_2_4_ranks) {
    check_lanes_by_rank(MPT_COMPRESSION_NONE, 6);
    check_lanes_by_rank(MPT_COMPRESSION_NONE, 70);
#ifdef MPTRAIN_ZLIB
    check_lanes_by_rank(MPT_COMPRESSION_GZIP, 6);
#endif
}

MPT_TEST(O26_order_depends_on_the_seed_alone) {
    static const int counts[6] = {11, 3, 25, 8, 1, 30};
    static trace forward, backward, t;
    mpt_ctx *ctx = new_ctx();
    const char *a, *b;
    char folder_a[1200], folder_b[1200], path[1300];
    mpt_loader_desc d;
    int first[6], i, at = 0, pass;
    snprintf(folder_a, sizeof folder_a, "%s", new_folder("o26a"));
    snprintf(folder_b, sizeof folder_b, "%s", new_folder("o26b"));
    a = folder_a;
    b = folder_b;
    for (i = 0; i < 6; i++) {
        first[i] = at;
        at += counts[i];
    }
    for (i = 0; i < 6; i++) { /* the same shards, made in opposite order */
        snprintf(path, sizeof path, "%s/x-%05d-of-%05d", a, i, 6);
        write_shard(ctx, path, first[i], counts[i], MPT_COMPRESSION_NONE);
        snprintf(path, sizeof path, "%s/x-%05d-of-%05d", b, 5 - i, 6);
        write_shard(ctx, path, first[5 - i], counts[5 - i], MPT_COMPRESSION_NONE);
    }
    d = raw_desc(&a, 1);
    d.num_lanes = 2;
    run_epochs(&d, 3, &forward);
    d.paths = &b;
    for (pass = 1; pass <= 8; pass *= 2) {
        d.num_workers = pass;
        run_epochs(&d, 3, &backward);
        check_same(&forward, &backward);
    }
    d.seed = 8;
    run_epochs(&d, 3, &t);
    CHECK(memcmp(t.ids, forward.ids, sizeof t.ids[0] * (size_t)t.n) != 0);
    mpt_ctx_destroy(ctx);
}

MPT_TEST(epochs_differ_in_order) {
    static const int counts[3] = {40, 40, 40};
    static trace one, two;
    mpt_ctx *ctx = new_ctx();
    const char *folder = new_folder("epochs");
    mpt_loader_desc d = raw_desc(&folder, 1);
    mpt_loader *ld = NULL;
    write_set(ctx, folder, counts, 3, MPT_COMPRESSION_NONE);
    memset(&one, 0, sizeof one);
    memset(&two, 0, sizeof two);
    CHECK_OK(ctx, mpt_loader_create(ctx, &d, &ld));
    CHECK_EQ_INT(mpt_loader_get_info(ld).epoch, 0);
    run_epoch(ctx, ld, &one);
    CHECK_EQ_INT(mpt_loader_get_info(ld).epoch, 1);
    run_epoch(ctx, ld, &two);
    check_each(&one, 120, 1);
    check_each(&two, 120, 1);
    CHECK(memcmp(one.ids, two.ids, sizeof one.ids[0] * (size_t)one.n) != 0);
    mpt_loader_destroy(ld);
    mpt_ctx_destroy(ctx);
}

MPT_TEST(without_shuffle_records_come_in_file_order) {
    static const int counts[3] = {5, 6, 7};
    static trace t, flat;
    mpt_ctx *ctx = new_ctx();
    const char *folder = new_folder("ordered");
    mpt_loader_desc d = raw_desc(&folder, 1);
    int i;
    write_set(ctx, folder, counts, 3, MPT_COMPRESSION_NONE);
    d.no_shuffle = 1;
    run_epochs(&d, 1, &t);
    lane_of(&t, 1, 0, &flat);
    CHECK_EQ_INT(flat.n, 18);
    for (i = 0; i < 18; i++) CHECK_EQ_INT(flat.ids[i], i);
    mpt_ctx_destroy(ctx);
}

/* ---- the last batch -----------------------------------------------------------------------------
   */
MPT_TEST(O23_last_batch_is_kept_dropped_or_padded) {
    static const int counts[2] = {50, 53};
    static trace t;
    mpt_ctx *ctx = new_ctx();
    const char *folder = new_folder("o23");
    mpt_loader_desc d = raw_desc(&folder, 1);
    write_set(ctx, folder, counts, 2, MPT_COMPRESSION_NONE);
    d.batch_size = 10;
    run_epochs(&d, 3, &t);
    CHECK_EQ_INT(t.records, 3 * 103);
    check_each(&t, 103, 3);
    d.last_batch = MPT_LAST_BATCH_DROP;
    run_epochs(&d, 3, &t);
    CHECK_EQ_INT(t.records, 3 * 100);
    d.last_batch = MPT_LAST_BATCH_PAD;
    run_epochs(&d, 3, &t);
    CHECK_EQ_INT(t.records, 3 * 110);
    d.num_lanes = 4; /* 26, 26, 26, 25: three batches each, the last one partial */
    d.last_batch = MPT_LAST_BATCH_KEEP;
    run_epochs(&d, 3, &t);
    check_each(&t, 103, 3);
    mpt_ctx_destroy(ctx);
}

MPT_TEST(O23_every_rank_counts_its_own_records_once) {
    static const int counts[2] = {50, 53};
    static trace t, sum;
    mpt_ctx *ctx = new_ctx();
    const char *folder = new_folder("o23r");
    mpt_loader_desc d = raw_desc(&folder, 1);
    int world, rank;
    write_set(ctx, folder, counts, 2, MPT_COMPRESSION_NONE);
    d.batch_size = 10;
    d.no_shuffle = 1;
    for (world = 1; world <= 4; world *= 2) {
        memset(&sum, 0, sizeof sum);
        for (rank = 0; rank < world; rank++) {
            d.rank = rank;
            d.world_size = world;
            run_epochs(&d, 3, &t);
            memcpy(sum.ids + sum.n, t.ids, sizeof t.ids[0] * (size_t)t.n);
            sum.n += t.n;
        }
        check_each(&sum, 103, 3);
    }
    mpt_ctx_destroy(ctx);
}

MPT_TEST(O25_each_epoch_is_a_new_partition_over_the_ranks) {
    static const int counts[5] = {8, 8, 8, 8, 8};
    static trace of_rank[4], epoch_sum, last;
    mpt_ctx *ctx = new_ctx();
    const char *folder = new_folder("o25");
    mpt_loader_desc d = raw_desc(&folder, 1);
    mpt_loader *ld[4];
    int rank, epoch;
    write_set(ctx, folder, counts, 5, MPT_COMPRESSION_NONE);
    d.world_size = 4;
    for (rank = 0; rank < 4; rank++) {
        d.rank = rank;
        CHECK_OK(ctx, mpt_loader_create(ctx, &d, &ld[rank]));
    }
    memset(&last, 0, sizeof last);
    for (epoch = 0; epoch < 3; epoch++) {
        memset(&epoch_sum, 0, sizeof epoch_sum);
        for (rank = 0; rank < 4; rank++) {
            memset(&of_rank[rank], 0, sizeof of_rank[rank]);
            run_epoch(ctx, ld[rank],
                      &of_rank[rank]); /* nobody tells the loader which epoch it is */
            memcpy(epoch_sum.ids + epoch_sum.n, of_rank[rank].ids,
                   sizeof epoch_sum.ids[0] * (size_t)of_rank[rank].n);
            epoch_sum.n += of_rank[rank].n;
        }
        check_each(&epoch_sum, 40, 1);
        CHECK(epoch_sum.n != last.n ||
              memcmp(epoch_sum.ids, last.ids, sizeof last.ids[0] * (size_t)last.n));
        last = epoch_sum;
    }
    for (rank = 0; rank < 4; rank++) mpt_loader_destroy(ld[rank]);
    mpt_ctx_destroy(ctx);
}

MPT_TEST(nothing_usable_is_an_error_on_any_rank) {
    static const int counts[2] = {20, 20};
    mpt_ctx *ctx = new_ctx();
    const char *folder = new_folder("unusable");
    mpt_loader_desc d = raw_desc(&folder, 1);
    write_set(ctx, folder, counts, 2, MPT_COMPRESSION_NONE);
    d.last_batch = MPT_LAST_BATCH_DROP;
    d.batch_size = 64;
    CHECK_CONTAINS(error_of(ctx, &d, MPT_ERR_INVALID_ARGUMENT), "no batch in an epoch");
    d.last_batch = MPT_LAST_BATCH_KEEP;
    d.on_bad_record = MPT_BAD_RECORD_SKIP;
    d.image_key = "nokey";
    CHECK_CONTAINS(error_of(ctx, &d, MPT_ERR_CORRUPT_DATA), "without one usable record (40 bad");
    d.world_size = 2;
    CHECK_CONTAINS(error_of(ctx, &d, MPT_ERR_CORRUPT_DATA), "without one usable record (20 bad");
    mpt_ctx_destroy(ctx);
}

/* ---- restore ------------------------------------------------------------------------------------
   */

/* Stops after every number of batches of two epochs, goes on in a new loader, compares with a run
   that was never stopped. */
static void check_restore(const mpt_loader_desc *desc, int step) {
    static trace whole, head;
    int stop, batches = 0, i;
    run_epochs(desc, 3, &whole);
    for (i = 0; i < whole.n; i++) batches += whole.ids[i] == -3;
    for (stop = 0; stop <= batches; stop += step) {
        mpt_ctx *ctx = new_ctx();
        mpt_loader *ld = NULL;
        mpt_loader_desc other = *desc;
        mpt_bytes state;
        uint8_t *kept;
        mpt_batch b;
        memset(&head, 0, sizeof head);
        CHECK_OK(ctx, mpt_loader_create(ctx, desc, &ld));
        for (i = 0; i < stop; i++) {
            mpt_result rc = mpt_loader_next(ld, &b);
            if (rc == MPT_END) rc = mpt_loader_next(ld, &b);
            CHECK_OK(ctx, rc);
            trace_batch(&head, &b);
        }
        CHECK_OK(ctx, mpt_loader_get_state(ld, &state));
        kept = (uint8_t *)malloc(state.size);
        memcpy(kept, state.data, state.size);
        state.data = kept;
        mpt_loader_destroy(ld);
        other.num_workers = stop % 4 + 1;
        CHECK_OK(ctx, mpt_loader_create(ctx, &other, &ld));
        /* it may have run already */
        for (i = 0; i < stop % 3; i++) CHECK(mpt_loader_next(ld, &b) >= 0);
        CHECK_OK(ctx, mpt_loader_set_state(ld, state));
        while (mpt_loader_get_info(ld).epoch < 3) run_epoch(ctx, ld, &head);
        check_same(&whole, &head);
        free(kept);
        mpt_loader_destroy(ld);
        mpt_ctx_destroy(ctx);
    }
}

MPT_TEST(restore_goes_on_bit_for_bit) {
    static const int counts[4] = {37, 40, 1, 22};
    mpt_ctx *ctx = new_ctx();
    const char *folder = new_folder("restore");
    mpt_loader_desc d = raw_desc(&folder, 1);
    write_set(ctx, folder, counts, 4, MPT_COMPRESSION_NONE);
    check_restore(&d, mpt_test_full() ? 1 : 3);
    d.num_lanes = 3;
    d.interleave = 2;
    check_restore(&d, mpt_test_full() ? 1 : 3);
    d.no_shuffle = 1;
    check_restore(&d, 4);
    mpt_ctx_destroy(ctx);
}

MPT_TEST(restore_of_whole_files_and_compressed_files) {
    static int counts[36];
    mpt_ctx *ctx = new_ctx();
    const char *folder = new_folder("restore2");
    mpt_loader_desc d = raw_desc(&folder, 1);
    int i;
    for (i = 0; i < 36; i++) counts[i] = 1 + i % 7;
    write_set(ctx, folder, counts, 36, MPT_COMPRESSION_NONE);
    d.num_lanes = 2;
    check_restore(&d, 5);
#ifdef MPTRAIN_ZLIB
    mpt_test_remove_tree(folder);
    CHECK(mkdir(folder, 0777) == 0);
    write_set(ctx, folder, counts, 5, MPT_COMPRESSION_GZIP);
    check_restore(&d, 1);
    d.num_lanes = 1;
    check_restore(&d, 2);
#endif
    mpt_ctx_destroy(ctx);
}

MPT_TEST(state_of_four_ranks_goes_on_with_two) {
    static const int counts[3] = {37, 40, 22};
    static trace whole, rest, a, b;
    mpt_ctx *ctx = new_ctx();
    const char *folder = new_folder("reshard");
    mpt_loader_desc d = raw_desc(&folder, 1);
    mpt_loader *ld = NULL;
    mpt_batch batch;
    uint8_t *joined = (uint8_t *)malloc(1 << 20);
    mpt_bytes state, all;
    int rank, lane, i;
    write_set(ctx, folder, counts, 3, MPT_COMPRESSION_NONE);
    d.num_lanes = 4;
    run_epochs(&d, 1, &whole);
    all.data = joined;
    all.size = 0;
    for (rank = 0; rank < 4; rank++) {
        mpt_loader_desc mine = d;
        mine.rank = rank;
        mine.world_size = 4;
        CHECK_OK(ctx, mpt_loader_create(ctx, &mine, &ld));
        for (i = 0; i < 2; i++) CHECK_OK(ctx, mpt_loader_next(ld, &batch));
        CHECK_OK(ctx, mpt_loader_get_state(ld, &state));
        memcpy(joined + all.size, state.data, state.size);
        all.size += state.size;
        mpt_loader_destroy(ld);
    }
    for (rank = 0; rank < 2; rank++) {
        mpt_loader_desc mine = d;
        mine.rank = rank;
        mine.world_size = 2;
        memset(&rest, 0, sizeof rest);
        CHECK_OK(ctx, mpt_loader_create(ctx, &mine, &ld));
        CHECK_OK(ctx, mpt_loader_set_state(ld, all));
        run_epoch(ctx, ld, &rest);
        for (lane = 0; lane < 2; lane++) {
            lane_of(&whole, 4, 2 * rank + lane, &a);
            lane_of(&rest, 2, lane, &b);
            CHECK_EQ_INT(a.n, b.n + 16);
            CHECK_EQ_MEM(a.ids + 16, b.ids, sizeof a.ids[0] * (size_t)b.n);
        }
        mpt_loader_destroy(ld);
    }
    state.data = joined; /* the first rank's block */
    state.size = (size_t)mpti_load_u32(joined + 8);
    CHECK_OK(ctx, mpt_loader_create(ctx, &d, &ld)); /* one rank, but only a quarter of the lanes */
    CHECK_RESULT(ctx, mpt_loader_set_state(ld, state), MPT_ERR_INVALID_ARGUMENT);
    CHECK_CONTAINS(mpt_last_error(ctx)->message, "1 of this rank's 4 lanes");
    mpt_loader_destroy(ld);
    free(joined);
    mpt_ctx_destroy(ctx);
}

/* get_state may fail for want of memory; the loader goes on as if it had not been asked. */
MPT_TEST(a_state_that_cannot_be_written_changes_nothing) {
    static const int counts[4] = {37, 40, 1, 22};
    static trace whole, t;
    const char *folder = new_folder("nostate");
    mpt_loader_desc d = raw_desc(&folder, 1);
    mpt_ctx *ctx = new_ctx();
    int64_t n;
    write_set(ctx, folder, counts, 4, MPT_COMPRESSION_NONE);
    mpt_ctx_destroy(ctx);
    d.num_lanes = 2;
    run_epochs(&d, 1, &whole);
    for (n = 1; n <= 6; n++) {
        mpt_test_allocator memory;
        mpt_ctx_desc cd;
        mpt_loader *ld = NULL;
        mpt_bytes state;
        mpt_batch b;
        int failed;
        memset(&cd, 0, sizeof cd);
        memset(&t, 0, sizeof t);
        mpt_test_allocator_init(&memory, 0, 0);
        cd.allocator = memory.hooks;
        CHECK_OK(NULL, mpt_ctx_create(&cd, &ctx));
        CHECK_OK(ctx, mpt_loader_create(ctx, &d, &ld));
        CHECK_OK(ctx, mpt_loader_next(ld, &b));
        trace_batch(&t, &b);
        mpti_mutex_lock(&ld->lock); /* while no worker allocates: the failure is get_state's */
        mpti_loader_pause(ld);
        memory.fail_at = memory.num_allocs + n;
        mpti_mutex_unlock(&ld->lock);
        failed = mpt_loader_get_state(ld, &state) != MPT_OK;
        memory.fail_at = 0;
        CHECK(failed || n > 1);
        run_epoch(ctx, ld, &t);
        check_same(&whole, &t);
        mpt_loader_destroy(ld);
        mpt_ctx_destroy(ctx);
        CHECK_NO_LEAK(&memory);
    }
}

MPT_TEST(a_foreign_or_damaged_state_is_refused) {
    static const int counts[2] = {30, 20};
    static trace before, after;
    mpt_ctx *ctx = new_ctx();
    const char *folder = new_folder("foreign");
    mpt_loader_desc d = raw_desc(&folder, 1), e;
    mpt_loader *ld = NULL, *other = NULL;
    mpt_bytes state, copy;
    uint8_t *bytes;
    mpt_batch b;
    size_t i;
    write_set(ctx, folder, counts, 2, MPT_COMPRESSION_NONE);
    memset(&after, 0, sizeof after);
    run_epochs(&d, 1, &before);
    CHECK_OK(ctx, mpt_loader_create(ctx, &d, &ld));
    CHECK_OK(ctx, mpt_loader_next(ld, &b));
    CHECK_OK(ctx, mpt_loader_get_state(ld, &state));
    e = d;
    e.seed = 9;
    CHECK_OK(ctx, mpt_loader_create(ctx, &e, &other));
    CHECK_RESULT(ctx, mpt_loader_set_state(other, state), MPT_ERR_INVALID_ARGUMENT);
    CHECK_CONTAINS(mpt_last_error(ctx)->message, "seed was 7, is 9 now");
    mpt_loader_destroy(other);
    bytes = (uint8_t *)malloc(state.size);
    memcpy(bytes, state.data, state.size);
    copy.data = bytes;
    CHECK_OK(ctx, mpt_loader_create(ctx, &d, &other));
    for (i = 0; i < state.size; i++) {
        copy.size = i;
        CHECK(mpt_loader_set_state(other, copy) < 0);
        copy.size = state.size;
        bytes[i] ^= (uint8_t)(1 + i % 255);
        CHECK(mpt_loader_set_state(other, copy) < 0);
        bytes[i] = state.data[i];
    }
    run_epoch(ctx, other, &after); /* none of this moved it */
    check_same(&before, &after);
    free(bytes);
    mpt_loader_destroy(other);
    mpt_loader_destroy(ld);
    mpt_ctx_destroy(ctx);
}

/* ---- damaged data -------------------------------------------------------------------------------
   */
typedef struct bad_log {
    int n;
    int64_t record[64];
    int rest_of_file[64];
    char cause[64][512];
} bad_log;

static void note_bad(const mpt_bad_record *bad, void *user) {
    bad_log *log = (bad_log *)user;
    if (log->n < 64) {
        log->record[log->n] = bad->record;
        log->rest_of_file[log->n] = bad->rest_of_file;
        snprintf(log->cause[log->n], sizeof log->cause[0], "%s", bad->cause);
    }
    log->n++;
}

/* A file in which records 100, 400 and 700 of n have a picture of the wrong size. */
static void write_with_bad_pictures(mpt_ctx *ctx, const char *path, int n) {
    static const uint8_t wrong[3] = {1, 2, 3};
    mpt_tfrecord_writer *w = open_writer(ctx, path, MPT_COMPRESSION_NONE);
    mpt_example *e = NULL;
    mpt_bytes value;
    int i;
    CHECK_OK(ctx, mpt_example_create(ctx, &e));
    value.data = wrong;
    value.size = sizeof wrong;
    for (i = 0; i < n; i++) {
        int64_t label = i % NUM_CLASSES;
        if (i == 100 || i == 400 || i == 700) {
            CHECK_OK(ctx, mpt_example_add_bytes(e, "image", &value, 1));
            CHECK_OK(ctx, mpt_example_add_int64s(e, "label", &label, 1));
        } else {
            add_sample(ctx, e, i, "image", "label", label);
        }
        write_example(ctx, w, e);
    }
    mpt_example_destroy(e);
    CHECK_OK(ctx, mpt_tfrecord_writer_finish(w));
    mpt_tfrecord_writer_close(w);
}

MPT_TEST(O17_bad_pictures_are_skipped_counted_and_limited) {
    static trace t, again;
    static bad_log log;
    mpt_ctx *ctx = new_ctx();
    const char *path = mpt_test_tmpfile("o17.tfrecord");
    mpt_loader_desc d = raw_desc(&path, 1);
    mpt_loader *ld = NULL;
    mpt_batch b;
    mpt_result rc;
    int full = 0;
    write_with_bad_pictures(ctx, path, 1000);
    d.on_bad_record = MPT_BAD_RECORD_SKIP;
    d.bad_record = note_bad;
    d.bad_record_user = &log;
    memset(&log, 0, sizeof log);
    memset(&t, 0, sizeof t);
    CHECK_OK(ctx, mpt_loader_create(ctx, &d, &ld));
    while ((rc = mpt_loader_next(ld, &b)) == MPT_OK) {
        full += b.num_valid == 8;
        trace_batch(&t, &b);
    }
    CHECK_RESULT(ctx, rc, MPT_END);
    CHECK_EQ_INT(t.records, 997);
    CHECK_EQ_INT(full, 124); /* 124 full ones and one of 5: skipped records leave no holes */
    CHECK_EQ_INT(log.n, 3);
    CHECK_EQ_INT(mpt_loader_get_info(ld).num_bad_records, 3); /* of the epoch that has ended */
    CHECK_CONTAINS(log.cause[0], "o17.tfrecord: record ");
    CHECK_CONTAINS(log.cause[0], "has 3 bytes");
    mpt_loader_destroy(ld);
    d.num_workers = 1;
    memset(&log, 0, sizeof log);
    run_epochs(&d, 1, &again);
    check_same(&t, &again);

    d.max_bad_records = 2;
    CHECK_OK(ctx, mpt_loader_create(ctx, &d, &ld));
    while ((rc = mpt_loader_next(ld, &b)) == MPT_OK) continue;
    CHECK_RESULT(ctx, rc, MPT_ERR_CORRUPT_DATA);
    CHECK_CONTAINS(mpt_last_error(ctx)->message, "more than 2 bad records (max_bad_records)");
    CHECK_RESULT(ctx, mpt_loader_next(ld, &b), MPT_ERR_CORRUPT_DATA); /* for good */
    mpt_loader_destroy(ld);

    d.on_bad_record = MPT_BAD_RECORD_FAIL;
    d.no_shuffle = 1;
    memset(&t, 0, sizeof t);
    CHECK_OK(ctx, mpt_loader_create(ctx, &d, &ld));
    while ((rc = mpt_loader_next(ld, &b)) == MPT_OK) trace_batch(&t, &b);
    CHECK_RESULT(ctx, rc, MPT_ERR_CORRUPT_DATA);
    CHECK_CONTAINS(mpt_last_error(ctx)->message, "record 100 ");
    CHECK_EQ_INT(t.records, 96); /* the batches before the one that holds it */
    mpt_loader_destroy(ld);
    mpt_ctx_destroy(ctx);
}

/* Reads everything under SKIP and SKIP_FILE after damaging one byte. Returns how many came. */
static int records_after_damage(mpt_ctx *ctx, const char *path, size_t at, mpt_on_bad_record policy,
                                bad_log *log) {
    static trace t;
    size_t size;
    uint8_t *bytes = mpt_test_read_file(path, &size);
    mpt_loader_desc d = raw_desc(&path, 1);
    bytes[at] ^= 0x55;
    mpt_test_write_file(path, bytes, size);
    d.on_bad_record = policy;
    d.bad_record = note_bad;
    d.bad_record_user = log;
    d.no_shuffle = 1;
    memset(log, 0, sizeof *log);
    run_epochs(&d, 1, &t);
    bytes[at] ^= 0x55;
    mpt_test_write_file(path, bytes, size);
    free(bytes);
    (void)ctx;
    return t.records;
}

MPT_TEST(O17_policies_on_damaged_framing) {
    static bad_log log;
    mpt_ctx *ctx = new_ctx();
    const char *path = mpt_test_tmpfile("framing.tfrecord");
    size_t size;
    write_shard(ctx, path, 0, 50, MPT_COMPRESSION_NONE);
    free(mpt_test_read_file(path, &size));
    size /= 50; /* all records are equally long */
    /* a payload byte of record 20 */
    CHECK_EQ_INT(records_after_damage(ctx, path, 20 * size + 14, MPT_BAD_RECORD_SKIP, &log), 49);
    CHECK_EQ_INT(log.n, 1);
    CHECK_EQ_INT(log.record[0], 20);
    CHECK_EQ_INT(log.rest_of_file[0], 0);
    CHECK_EQ_INT(records_after_damage(ctx, path, 20 * size + 14, MPT_BAD_RECORD_SKIP_FILE, &log),
                 20);
    CHECK_EQ_INT(log.rest_of_file[0], 1);
    /* its length: what follows can't be found */
    CHECK_EQ_INT(records_after_damage(ctx, path, 20 * size, MPT_BAD_RECORD_SKIP, &log), 20);
    CHECK_EQ_INT(log.n, 1);
    CHECK_EQ_INT(log.rest_of_file[0], 1);
    mpt_ctx_destroy(ctx);
}

MPT_TEST(damage_gives_the_same_records_in_any_lanes) {
    static const int counts[3] = {40, 40, 40};
    static trace t;
    static bad_log log;
    mpt_ctx *ctx = new_ctx();
    const char *folder = new_folder("damaged");
    mpt_loader_desc d = raw_desc(&folder, 1);
    char path[1300];
    uint8_t *bytes;
    size_t size;
    int lanes, i;
    write_set(ctx, folder, counts, 3, MPT_COMPRESSION_NONE);
    snprintf(path, sizeof path, "%s/tfrecord-00001-of-00003", folder);
    bytes = mpt_test_read_file(path, &size);
    bytes[size / 40 * 30] ^= 1; /* the length of its record 30 */
    mpt_test_write_file(path, bytes, size);
    free(bytes);
    d.on_bad_record = MPT_BAD_RECORD_SKIP;
    d.bad_record = note_bad;
    d.bad_record_user = &log;
    for (lanes = 1; lanes <= 4; lanes++) {
        memset(&log, 0, sizeof log);
        d.num_lanes = lanes;
        run_epochs(&d, 1, &t);
        CHECK_EQ_INT(t.records, 110);
        CHECK_EQ_INT(log.n, 1); /* told once, not by each lane */
        for (i = 0; i < t.n; i++) CHECK(t.ids[i] < 70 || t.ids[i] >= 80);
    }
    mpt_ctx_destroy(ctx);
}

/* ---- schema and labels --------------------------------------------------------------------------
   */

static void write_one(mpt_ctx *ctx, const char *path, mpt_example *e) {
    mpt_tfrecord_writer *w = open_writer(ctx, path, MPT_COMPRESSION_NONE);
    write_example(ctx, w, e);
    CHECK_OK(ctx, mpt_tfrecord_writer_finish(w));
    mpt_tfrecord_writer_close(w);
}

MPT_TEST(O08_missing_and_wrong_features_are_named) {
    static const uint8_t three[1] = {'3'};
    static const float real = 3.0f;
    mpt_ctx *ctx = new_ctx();
    const char *path = mpt_test_tmpfile("o08.tfrecord"), *message;
    mpt_loader_desc d = raw_desc(&path, 1);
    mpt_example *e = NULL;
    mpt_bytes value, pixels;
    value.data = three;
    value.size = 1;
    pixels.data = (const uint8_t *)"abcd";
    pixels.size = 4;
    CHECK_OK(ctx, mpt_example_create(ctx, &e));
    CHECK_OK(ctx, mpt_example_add_bytes(e, "image/encoded", &pixels, 1));
    CHECK_OK(ctx, mpt_example_add_bytes(e, "other", &pixels, 1));
    write_one(ctx, path, e);
    message = error_of(ctx, &d, MPT_ERR_CORRUPT_DATA);
    CHECK_CONTAINS(message, "o08.tfrecord: record 0 at offset 0: no feature");
    CHECK_CONTAINS(message, "image/encoded, other");
    CHECK_OK(ctx, mpt_example_add_bytes(e, "image/encoded", &pixels, 1));
    CHECK_OK(ctx, mpt_example_add_floats(e, "image/class/label", &real, 1));
    write_one(ctx, path, e);
    CHECK_CONTAINS(error_of(ctx, &d, MPT_ERR_CORRUPT_DATA),
                   "feature image/class/label is of kind float, expected int64");
    CHECK_OK(ctx, mpt_example_add_bytes(e, "image/encoded", &pixels, 1));
    CHECK_OK(ctx, mpt_example_add_bytes(e, "image/class/label", &value, 1));
    write_one(ctx, path, e);
    CHECK_CONTAINS(error_of(ctx, &d, MPT_ERR_CORRUPT_DATA),
                   "feature image/class/label is of kind bytes, expected int64");
    mpt_example_destroy(e);
    mpt_ctx_destroy(ctx);
}

MPT_TEST(O09_an_empty_list_is_a_missing_value) {
    mpt_ctx *ctx = new_ctx();
    const char *path = mpt_test_tmpfile("o09.tfrecord");
    mpt_loader_desc d = raw_desc(&path, 1);
    mpt_example *e = NULL;
    mpt_bytes pixels;
    pixels.data = (const uint8_t *)"abcd";
    pixels.size = 4;
    CHECK_OK(ctx, mpt_example_create(ctx, &e));
    CHECK_OK(ctx, mpt_example_add_bytes(e, "image", &pixels, 1));
    CHECK_OK(ctx, mpt_example_add_int64s(e, "label", NULL, 0));
    write_one(ctx, path, e);
    CHECK_CONTAINS(error_of(ctx, &d, MPT_ERR_CORRUPT_DATA), "feature label has no value");
    mpt_example_destroy(e);
    mpt_ctx_destroy(ctx);
}

static void write_labels(mpt_ctx *ctx, const char *path, const char *image_key,
                         const char *label_key, const int64_t *labels, int n) {
    mpt_tfrecord_writer *w = open_writer(ctx, path, MPT_COMPRESSION_NONE);
    mpt_example *e = NULL;
    int i;
    CHECK_OK(ctx, mpt_example_create(ctx, &e));
    for (i = 0; i < n; i++) {
        add_sample(ctx, e, i, image_key, label_key, labels[i]);
        write_example(ctx, w, e);
    }
    mpt_example_destroy(e);
    CHECK_OK(ctx, mpt_tfrecord_writer_finish(w));
    mpt_tfrecord_writer_close(w);
}

MPT_TEST(O10_labels_out_of_range_are_errors_that_no_policy_skips) {
    static const int64_t labels[4] = {10, -1, (int64_t)1 << 40, INT64_MIN};
    mpt_ctx *ctx = new_ctx();
    const char *path = mpt_test_tmpfile("o10.tfrecord"), *message;
    mpt_loader_desc d = raw_desc(&path, 1);
    char expected[64];
    int i;
    d.on_bad_record = MPT_BAD_RECORD_SKIP;
    for (i = 0; i < 4; i++) {
        write_labels(ctx, path, "image", "label", &labels[i], 1);
        message = error_of(ctx, &d, MPT_ERR_INVALID_ARGUMENT);
        snprintf(expected, sizeof expected, "record 0 at offset 0: label %lld",
                 (long long)labels[i]);
        CHECK_CONTAINS(message, expected);
        CHECK_CONTAINS(message, "0 .. 9");
    }
    mpt_ctx_destroy(ctx);
}

MPT_TEST(O11_label_offset_follows_the_schema_and_contradictions_are_loud) {
    static const int64_t from_one[10] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10}, from_zero[2] = {1, 0};
    mpt_ctx *ctx = new_ctx();
    const char *path = mpt_test_tmpfile("o11.tfrecord");
    mpt_loader_desc d = raw_desc(&path, 1);
    mpt_loader *ld = NULL;
    mpt_loader_info info;
    mpt_batch b;
    int i;
    write_labels(ctx, path, "image/encoded", "image/class/label", from_one, 10);
    d.no_shuffle = 1;
    d.batch_size = 10;
    CHECK_OK(ctx, mpt_loader_create(ctx, &d, &ld));
    info = mpt_loader_get_info(ld);
    CHECK_EQ_STR(info.image_key, "image/encoded");
    CHECK_EQ_STR(info.label_key, "image/class/label");
    CHECK_EQ_INT(info.label_offset, 1);
    CHECK_OK(ctx, mpt_loader_next(ld, &b));
    for (i = 0; i < 10; i++) CHECK_EQ_INT(((const int32_t *)b.labels.data)[i], i);
    mpt_loader_destroy(ld);
    d.label_offset_is_set = 1; /* offset 0 by hand: label 10 doesn't fit, and the hint says why */
    CHECK_CONTAINS(error_of(ctx, &d, MPT_ERR_INVALID_ARGUMENT), "set label_offset to 1");
    d.label_offset_is_set = 0;
    d.label_offset = 1; /* the advice, followed: an offset other than 0 needs no flag */
    CHECK_OK(ctx, mpt_loader_create(ctx, &d, &ld));
    CHECK_OK(ctx, mpt_loader_next(ld, &b));
    CHECK_EQ_INT(((const int32_t *)b.labels.data)[9], 9);
    mpt_loader_destroy(ld);
    d.label_offset = 0;
    write_labels(ctx, path, "image/encoded", "image/class/label", from_zero, 2);
    CHECK_CONTAINS(error_of(ctx, &d, MPT_ERR_INVALID_ARGUMENT), "set label_offset to 0");
    write_labels(ctx, path, "image", "label", from_zero, 2);
    CHECK_OK(ctx, mpt_loader_create(ctx, &d, &ld));
    CHECK_EQ_INT(mpt_loader_get_info(ld).label_offset, 0);
    CHECK_OK(ctx, mpt_loader_next(ld, &b));
    CHECK_EQ_INT(((const int32_t *)b.labels.data)[0], 1);
    mpt_loader_destroy(ld);
    mpt_ctx_destroy(ctx);
}

MPT_TEST(O12_base64_and_raw_pixels_are_recognised) {
    static uint8_t raw[32 * 32 * 3];
    mpt_ctx *ctx = new_ctx();
    const char *path = mpt_test_tmpfile("o12.tfrecord"), *message;
    mpt_loader_desc d = raw_desc(&path, 1);
    mpt_example *e = NULL;
    int64_t label = 1;
    mpt_bytes value;
    d.raw_pixels = 0;
    d.height = d.width = 32;
    d.channels = 3;
    value.data = (const uint8_t *)"/9j/4AAQSkZJRgABAQAAAQABAAD";
    value.size = 27;
    CHECK_OK(ctx, mpt_example_create(ctx, &e));
    CHECK_OK(ctx, mpt_example_add_bytes(e, "image", &value, 1));
    CHECK_OK(ctx, mpt_example_add_int64s(e, "label", &label, 1));
    write_one(ctx, path, e);
    message = error_of(ctx, &d, MPT_ERR_CORRUPT_DATA);
    CHECK_CONTAINS(message, "record 0");
    CHECK_CONTAINS(message, "2f 39 6a 2f 34 41 41 51");
    CHECK_CONTAINS(message, "base64");
    value.data = raw;
    value.size = sizeof raw;
    CHECK_OK(ctx, mpt_example_add_bytes(e, "image", &value, 1));
    CHECK_OK(ctx, mpt_example_add_int64s(e, "label", &label, 1));
    write_one(ctx, path, e);
    message = error_of(ctx, &d, MPT_ERR_CORRUPT_DATA);
    CHECK_CONTAINS(message, "00 00 00 00 00 00 00 00");
    CHECK_CONTAINS(message, "raw_pixels");
    mpt_example_destroy(e);
    mpt_ctx_destroy(ctx);
}

/* ---- files --------------------------------------------------------------------------------------
   */
MPT_TEST(O04_empty_shards_and_empty_sets) {
    static const int some[3] = {5, 0, 6}, none[3] = {0, 0, 0};
    static trace t;
    mpt_ctx *ctx = new_ctx();
    const char *folder = new_folder("o04"), *nothing;
    mpt_loader_desc d = raw_desc(&folder, 1);
    char pattern[1200];
    int lanes;
    write_set(ctx, folder, some, 3, MPT_COMPRESSION_NONE);
    for (lanes = 1; lanes <= 3; lanes++) {
        d.num_lanes = lanes;
        run_epochs(&d, 2, &t);
        check_each(&t, 11, 2);
    }
    write_set(ctx, folder, none, 3, MPT_COMPRESSION_NONE);
    CHECK_CONTAINS(error_of(ctx, &d, MPT_ERR_CORRUPT_DATA), "no record in any of 3 files");
    snprintf(pattern, sizeof pattern, "%s/nothing-*", folder);
    nothing = pattern;
    d.paths = &nothing;
    CHECK_CONTAINS(error_of(ctx, &d, MPT_ERR_IO), "nothing-*: no file matches");
    nothing = "/no/such/folder/file.tfrecord";
    CHECK_CONTAINS(error_of(ctx, &d, MPT_ERR_IO), "/no/such/folder/file.tfrecord");
    mpt_ctx_destroy(ctx);
}

static char warnings[4096]; /* all that were logged, a line each */
static void note_log(int level, const char *message, void *user) {
    size_t used = strlen(warnings);
    (void)user;
    if (level == MPT_LOG_WARNING)
        snprintf(warnings + used, sizeof warnings - used, "%s\n", message);
}

MPT_TEST(names_globs_directories_and_shard_sets) {
    static const int counts[3] = {5, 7, 9};
    static trace whole, t;
    mpt_ctx_desc cd;
    mpt_ctx *ctx = NULL;
    const char *folder = new_folder("names"), *two[2];
    char pattern[1200], other[1300];
    mpt_loader_desc d = raw_desc(&folder, 1);
    mpt_loader *ld = NULL;
    memset(&cd, 0, sizeof cd);
    cd.logger.log = note_log;
    CHECK_OK(NULL, mpt_ctx_create(&cd, &ctx));
    write_set(ctx, folder, counts, 3, MPT_COMPRESSION_NONE);
    mpt_test_write_file(mpt_test_join(folder, "dataset_info.txt"), "x", 1);
    mpt_test_write_file(mpt_test_join(folder, "tfrecord-00000-of-00003.idx"), "junk", 4);
    run_epochs(&d, 1, &whole); /* the directory */
    check_each(&whole, 21, 1);
    two[0] = pattern;
    d.paths = two;
    snprintf(pattern, sizeof pattern, "%s/tfrecord-*", folder);
    run_epochs(&d, 1, &t);
    check_same(&whole, &t);
    snprintf(pattern, sizeof pattern, "%s/tfrecord@3", folder);
    run_epochs(&d, 1, &t);
    check_same(&whole, &t);
    snprintf(pattern, sizeof pattern, "%s/tfrecord@4", folder);
    CHECK_CONTAINS(error_of(ctx, &d, MPT_ERR_IO), "tfrecord-00000-of-00004");
    snprintf(pattern, sizeof pattern, "%s/tfrecord-0000[01]*", folder);
    warnings[0] = 0;
    CHECK_OK(ctx, mpt_loader_create(ctx, &d, &ld));
    CHECK_CONTAINS(warnings, "2 of the 3 files of this set are here");
    mpt_loader_destroy(ld);
    snprintf(other, sizeof other, "%s/tfrecord-00001-of-00003", folder);
    two[1] = other;
    d.num_paths = 2;
    CHECK_CONTAINS(error_of(ctx, &d, MPT_ERR_INVALID_ARGUMENT),
                   "tfrecord-00001-of-00003: named twice");
    mpt_ctx_destroy(ctx);
}

MPT_TEST(counts_come_from_the_best_source) {
    static const int counts[3] = {50, 60, 70};
    static const char info_json[] =
        "{\"name\": \"x\", \"splits\": [{\"name\": \"test\", \"shardLengths\": [\"9\"]}, "
        "{\"name\": \"train\", \"numBytes\": \"1\", \"shardLengths\": [\"50\", \"60\", \"71\"]}]}";
    static trace t;
    mpt_ctx_desc cd;
    mpt_ctx *ctx = NULL;
    const char *folder = new_folder("counts");
    mpt_loader_desc d = raw_desc(&folder, 1);
    mpt_tfrecord_desc rd;
    mpt_tfrecord_index *index = NULL;
    mpt_loader *ld = NULL;
    char path[1300], idx[1320];
    mpt_loader_info info;
    int i, total = 0;
    memset(&cd, 0, sizeof cd);
    cd.logger.log = note_log;
    CHECK_OK(NULL, mpt_ctx_create(&cd, &ctx));
    memset(&rd, 0, sizeof rd);
    for (i = 0; i < 3; i++) {
        snprintf(path, sizeof path, "%s/x-train.tfrecord-%05d-of-%05d", folder, i, 3);
        write_shard(ctx, path, total, counts[i], MPT_COMPRESSION_NONE);
        total += counts[i];
    }
    CHECK_OK(ctx, mpt_loader_create(ctx, &d, &ld));
    info = mpt_loader_get_info(ld);
    CHECK_EQ_INT(info.num_records, 180);
    CHECK_EQ_INT(info.num_records_source, MPT_COUNT_HEADERS);
    CHECK_EQ_INT(info.steps_per_epoch, 23);
    memset(&t, 0, sizeof t);
    run_epoch(ctx, ld, &t);
    CHECK_EQ_INT(mpt_loader_get_info(ld).num_records_source, MPT_COUNT_EPOCH);
    CHECK_EQ_INT(mpt_loader_get_info(ld).steps_per_epoch, 23);
    mpt_loader_destroy(ld);
    for (i = 0; i < 3; i++) {
        snprintf(path, sizeof path, "%s/x-train.tfrecord-%05d-of-%05d", folder, i, 3);
        snprintf(idx, sizeof idx, "%s.idx", path);
        rd.path = path;
        CHECK_OK(ctx, mpt_tfrecord_index_build(ctx, &rd, &index));
        CHECK_EQ_INT(index->num_records, counts[i]);
        CHECK_OK(ctx, mpt_tfrecord_index_save(ctx, index, NULL, idx));
        mpt_tfrecord_index_destroy(ctx, index);
    }
    CHECK_OK(ctx, mpt_loader_create(ctx, &d, &ld));
    CHECK_EQ_INT(mpt_loader_get_info(ld).num_records_source, MPT_COUNT_INDEX);
    CHECK_EQ_INT(mpt_loader_get_info(ld).num_records, 180);
    mpt_loader_destroy(ld);
    mpt_test_write_file(mpt_test_join(folder, "dataset_info.json"), info_json,
                        sizeof info_json - 1);
    CHECK_OK(ctx, mpt_loader_create(ctx, &d, &ld));
    CHECK_EQ_INT(mpt_loader_get_info(ld).num_records_source, MPT_COUNT_DATASET_INFO);
    CHECK_EQ_INT(mpt_loader_get_info(ld).num_records, 181);
    mpt_loader_destroy(ld);
    d.num_records = 1000;
    CHECK_OK(ctx, mpt_loader_create(ctx, &d, &ld));
    CHECK_EQ_INT(mpt_loader_get_info(ld).num_records_source, MPT_COUNT_GIVEN);
    CHECK_EQ_INT(mpt_loader_get_info(ld).num_records, 1000);
    warnings[0] = 0;
    memset(&t, 0, sizeof t);
    run_epoch(ctx, ld, &t); /* contradicted by the data, and said so */
    CHECK_CONTAINS(warnings, "num_records was given as 1000, but the epoch had 180");
    CHECK_EQ_INT(mpt_loader_get_info(ld).num_records, 180);
    mpt_loader_destroy(ld);
    mpt_ctx_destroy(ctx);
}

MPT_TEST(a_stale_index_is_said_and_passed_over) {
    static const int counts[2] = {50, 60};
    static trace t;
    mpt_ctx_desc cd;
    mpt_ctx *ctx = NULL;
    const char *folder = new_folder("stale");
    mpt_loader_desc d = raw_desc(&folder, 1);
    mpt_loader *ld = NULL;
    memset(&cd, 0, sizeof cd);
    cd.logger.log = note_log;
    CHECK_OK(NULL, mpt_ctx_create(&cd, &ctx));
    write_set(ctx, folder, counts, 2, MPT_COMPRESSION_NONE);
    mpt_test_write_file(mpt_test_join(folder, "tfrecord-00001-of-00002.idx"), "0 40\n40 40\n", 11);
    d.num_lanes = 2;
    warnings[0] = 0;
    CHECK_OK(ctx, mpt_loader_create(ctx, &d, &ld));
    CHECK_CONTAINS(warnings, "tfrecord-00001-of-00002");
    memset(&t, 0, sizeof t);
    run_epoch(ctx, ld, &t);
    check_each(&t, 110, 1);
    mpt_loader_destroy(ld);
    mpt_ctx_destroy(ctx);
}

/* A thread that was joined may stand in /proc for a moment longer. */
static void check_threads(int expected) {
    int tries;
    for (tries = 0; tries < 1000 && count_threads() != expected; tries++) usleep(1000);
    CHECK_EQ_INT(count_threads(), expected);
}

MPT_TEST(O27_few_descriptors_and_none_left_open) {
    static trace t;
    static bad_log log;
    static int counts[500];
    struct rlimit old, low;
    mpt_ctx *ctx = new_ctx();
    const char *folder = new_folder("o27");
    mpt_loader_desc d = raw_desc(&folder, 1);
    mpt_loader *ld = NULL;
    int before, threads, epoch, i, epochs = mpt_test_full() ? 20 : 3;
    char path[1300];
    for (i = 0; i < 500; i++) counts[i] = 2;
    write_set(ctx, folder, counts, 500, MPT_COMPRESSION_NONE);
    for (i = 0; i < 10; i++) {
        snprintf(path, sizeof path, "%s/tfrecord-%05d-of-%05d", folder, i * 50, 500);
        mpt_test_write_file(path, "this is no record at all, only text", 35);
    }
    before = count_open_files();
    threads = count_threads();
    CHECK(getrlimit(RLIMIT_NOFILE, &old) == 0);
    low = old;
    low.rlim_cur = 64;
    CHECK(setrlimit(RLIMIT_NOFILE, &low) == 0);
    d.on_bad_record = MPT_BAD_RECORD_SKIP;
    d.bad_record = note_bad;
    d.bad_record_user = &log;
    d.num_lanes = 4; /* record dealing would need 64 files a lane: whole files here */
    memset(&log, 0, sizeof log);
    CHECK_OK(ctx, mpt_loader_create(ctx, &d, &ld));
    for (epoch = 0; epoch < epochs; epoch++) {
        memset(&t, 0, sizeof t);
        run_epoch(ctx, ld, &t);
        CHECK_EQ_INT(t.records, 980);
    }
    CHECK_EQ_INT(log.n, 10 * epochs);
    mpt_loader_destroy(ld);
    CHECK(setrlimit(RLIMIT_NOFILE, &old) == 0);
    CHECK_EQ_INT(count_open_files(), before);
    check_threads(threads);
    mpt_ctx_destroy(ctx);
}

MPT_TEST(every_stop_joins_threads_and_closes_files) {
    static const int counts[4] = {60, 60, 60, 60};
    mpt_ctx *ctx = new_ctx();
    const char *folder = new_folder("stops");
    mpt_loader_desc d = raw_desc(&folder, 1);
    mpt_loader *ld = NULL;
    mpt_batch b;
    int before, threads, stop, i;
    write_set(ctx, folder, counts, 4, MPT_COMPRESSION_NONE);
    before = count_open_files();
    threads = count_threads();
    for (stop = 0; stop < 40; stop++) {
        d.num_workers = 1 + stop % 4;
        d.num_lanes = 1 + stop % 3;
        CHECK_OK(ctx, mpt_loader_create(ctx, &d, &ld));
        for (i = 0; i < stop; i++) CHECK(mpt_loader_next(ld, &b) >= 0);
        mpt_loader_destroy(ld);
        CHECK_EQ_INT(count_open_files(), before);
        check_threads(threads);
    }
    mpt_ctx_destroy(ctx);
}

/* ---- storage that stutters or fails -------------------------------------------------------------
   */

/* Files behind a table that reads 1..7 bytes at a time, is interrupted, and fails on demand. */
typedef struct shaky {
    mpt_io io;
    pthread_mutex_t lock;
    int64_t reads, fail_at; /* the read with this number fails, from 1; 0: none */
    int fail_from_there, failures, tiny, open_files;
} shaky;

typedef struct shaky_file {
    shaky *owner;
    void *file;
} shaky_file;

static mpt_result shaky_open(const char *path, void **file, void *user) {
    shaky *s = (shaky *)user;
    shaky_file *f = (shaky_file *)calloc(1, sizeof *f);
    mpt_result rc;
    f->owner = s;
    *file = f;
    rc = mpt_io_files()->open(path, &f->file, NULL);
    if (rc && f->file) mpt_io_files()->close(f->file);
    if (rc) {
        free(f);
        *file = NULL;
        return rc;
    }
    pthread_mutex_lock(&s->lock);
    s->open_files++;
    pthread_mutex_unlock(&s->lock);
    return MPT_OK;
}

static int64_t shaky_read(void *file, void *dst, size_t size) {
    shaky_file *f = (shaky_file *)file;
    shaky *s = f->owner;
    int64_t number;
    int fails;
    pthread_mutex_lock(&s->lock);
    number = ++s->reads;
    fails = s->fail_at && (s->fail_from_there ? number >= s->fail_at : number == s->fail_at);
    s->failures += fails;
    pthread_mutex_unlock(&s->lock);
    if (fails) {
        errno = EIO;
        return -1;
    }
    if (s->tiny && number % 3 == 0) {
        errno = EINTR;
        return -1;
    }
    if (s->tiny && size > (size_t)(1 + number % 7)) size = (size_t)(1 + number % 7);
    return mpt_io_files()->read(f->file, dst, size);
}

static int64_t shaky_size(void *file) {
    return mpt_io_files()->size(((shaky_file *)file)->file);
}

static mpt_result shaky_seek(void *file, uint64_t offset) {
    return mpt_io_files()->seek(((shaky_file *)file)->file, offset);
}

static mpt_result shaky_close(void *file) {
    shaky_file *f = (shaky_file *)file;
    mpt_result rc = mpt_io_files()->close(f->file);
    pthread_mutex_lock(&f->owner->lock);
    f->owner->open_files--;
    pthread_mutex_unlock(&f->owner->lock);
    free(f);
    return rc;
}

static mpt_result shaky_list(const char *pattern, void (*found)(const char *path, void *arg),
                             void *arg, void *user) {
    (void)user;
    return mpt_io_files()->list(pattern, found, arg, NULL);
}

static const char *shaky_error(void *file) {
    (void)file;
    return "made to fail";
}

static void shaky_init(shaky *s) {
    memset(s, 0, sizeof *s);
    pthread_mutex_init(&s->lock, NULL);
    s->io.open = shaky_open;
    s->io.read = shaky_read;
    s->io.size = shaky_size;
    s->io.seek = shaky_seek;
    s->io.close = shaky_close;
    s->io.list = shaky_list;
    s->io.error = shaky_error;
    s->io.user = s;
}

MPT_TEST(O29_short_reads_and_interrupts_lose_nothing) {
    static const int counts[3] = {20, 30, 10};
    static trace plain, t;
    shaky s;
    mpt_ctx *ctx = new_ctx();
    const char *folder = new_folder("o29");
    mpt_loader_desc d = raw_desc(&folder, 1);
    write_set(ctx, folder, counts, 3, MPT_COMPRESSION_NONE);
    d.num_lanes = 2;
    run_epochs(&d, 2, &plain);
    shaky_init(&s);
    d.io = &s.io;
    s.tiny = 1;
    run_epochs(&d, 2, &t);
    check_same(&plain, &t);
    s.fail_at = s.reads + 40; /* one EIO in the middle: tried again */
    run_epochs(&d, 2, &t);
    check_same(&plain, &t);
    CHECK_EQ_INT(s.failures, 1);
    CHECK_EQ_INT(s.open_files, 0);
    mpt_ctx_destroy(ctx);
}

MPT_TEST(O29_storage_that_fails_for_good_is_no_corruption) {
    static const int counts[3] = {200, 300, 100};
    shaky s;
    mpt_ctx *ctx = new_ctx();
    const char *folder = new_folder("o29b"), *message;
    mpt_loader_desc d = raw_desc(&folder, 1);
    write_set(ctx, folder, counts, 3, MPT_COMPRESSION_NONE);
    shaky_init(&s);
    d.io = &s.io;
    d.num_records = 600;
    d.on_bad_record = MPT_BAD_RECORD_SKIP; /* no policy skips a storage that is down */
    s.fail_at = 5;
    s.fail_from_there = 1;
    message = error_of(ctx, &d, MPT_ERR_IO);
    CHECK_CONTAINS(message, "tfrecord-0000");
    CHECK(strstr(message, "corrupt") == NULL);
    CHECK_EQ_INT(mpt_last_error(ctx)->native_code, EIO);
    CHECK_EQ_INT(s.open_files, 0);
    mpt_ctx_destroy(ctx);
}

/* Two epochs; every failure has to be an error, and a clean run has to be complete. */
static mpt_result run_under_faults(mpt_ctx *ctx, const mpt_loader_desc *d, trace *t) {
    mpt_loader *ld = NULL;
    mpt_batch b;
    mpt_bytes state;
    mpt_result rc = mpt_loader_create(ctx, d, &ld);
    int ends = 0;
    memset(t, 0, sizeof *t);
    while (rc == MPT_OK && ends < 2) {
        rc = mpt_loader_next(ld, &b);
        if (rc == MPT_OK) trace_batch(t, &b);
        if (rc == MPT_END) {
            ends++;
            rc = MPT_OK;
        }
        if (rc == MPT_OK && t->records == 24) {
            rc = mpt_loader_get_state(ld, &state);
            if (rc == MPT_OK) rc = mpt_loader_set_state(ld, state);
        }
    }
    mpt_loader_destroy(ld);
    return rc;
}

MPT_TEST(every_failing_read_is_an_error_or_repaired) {
    static const int counts[3] = {20, 30, 10};
    static trace plain, t;
    shaky s;
    mpt_ctx *ctx = new_ctx();
    const char *folder = new_folder("faults");
    mpt_loader_desc d = raw_desc(&folder, 1);
    int n, from_there, errors = 0;
    write_set(ctx, folder, counts, 3, MPT_COMPRESSION_NONE);
    d.num_lanes = 2;
    CHECK_OK(ctx, run_under_faults(ctx, &d, &plain));
    shaky_init(&s);
    d.io = &s.io;
    for (from_there = 0; from_there < 2; from_there++)
        for (n = 1;; n += mpt_test_full() ? 1 : 5) {
            mpt_result rc;
            s.reads = s.failures = 0;
            s.fail_at = n;
            s.fail_from_there = from_there;
            rc = run_under_faults(ctx, &d, &t);
            CHECK_EQ_INT(s.open_files, 0);
            if (rc == MPT_OK) check_same(&plain, &t);
            else CHECK_RESULT(ctx, rc, MPT_ERR_IO);
            if (!s.failures) break;
            errors += rc != MPT_OK; /* unheard: in reading ahead, behind what was delivered */
        }
    CHECK(errors > 0);
    mpt_ctx_destroy(ctx);
}

static void check_every_allocation(mpt_loader_desc *d, int from_there) {
    static trace plain, t;
    mpt_ctx *ctx = new_ctx();
    int n, step = mpt_test_full() ? 1 : 7, errors = 0;
    CHECK_OK(ctx, run_under_faults(ctx, d, &plain));
    mpt_ctx_destroy(ctx);
    for (n = 1;; n += step) {
        mpt_test_allocator memory;
        mpt_ctx_desc cd;
        mpt_result rc;
        int failed;
        memset(&cd, 0, sizeof cd);
        mpt_test_allocator_init(&memory, n, from_there);
        cd.allocator = memory.hooks;
        ctx = NULL;
        rc = mpt_ctx_create(&cd, &ctx);
        if (rc == MPT_OK) rc = run_under_faults(ctx, d, &t);
        if (rc == MPT_OK) check_same(&plain, &t);
        else CHECK_EQ_INT(rc, MPT_ERR_OUT_OF_MEMORY);
        mpt_ctx_destroy(ctx);
        failed = memory.has_failed;
        CHECK_NO_LEAK(&memory);
        errors += rc != MPT_OK;
        /* a failure that nobody hears of was in reading ahead, behind what was delivered */
        if (!failed) break;
    }
    CHECK(errors > 0);
}

MPT_TEST(every_failing_allocation_is_an_error_and_leaks_nothing) {
    static const int counts[3] = {20, 30, 10};
    mpt_ctx *ctx = new_ctx();
    const char *folder = new_folder("memory");
    mpt_loader_desc d = raw_desc(&folder, 1);
    write_set(ctx, folder, counts, 3, MPT_COMPRESSION_NONE);
    d.num_lanes = 2;
    check_every_allocation(&d, 0);
    check_every_allocation(&d, 1);
    mpt_ctx_destroy(ctx);
}

/* ---- numbers in the batch -----------------------------------------------------------------------
   */
MPT_TEST(arrays_are_batched_like_files) {
    static uint8_t pixels[200][4];
    static int32_t labels[200];
    static trace t, again;
    mpt_tensor x, y;
    mpt_loader_desc d = raw_desc(NULL, 0);
    mpt_ctx *ctx = new_ctx();
    mpt_loader *ld = NULL;
    int i;
    for (i = 0; i < 200; i++) {
        pixels[i][0] = (uint8_t)i;
        labels[i] = i % NUM_CLASSES;
    }
    memset(&x, 0, sizeof x);
    memset(&y, 0, sizeof y);
    x.data = pixels;
    x.dtype = MPT_U8;
    x.num_dims = 4;
    x.dims[0] = 200;
    x.dims[1] = x.dims[2] = 2;
    x.dims[3] = 1;
    y.data = labels;
    y.dtype = MPT_I32;
    y.num_dims = 1;
    y.dims[0] = 200;
    d.array_images = &x;
    d.array_labels = &y;
    d.shuffle_buffer = 0;
    run_epochs(&d, 2, &t);
    check_each(&t, 200, 2);
    d.num_lanes = 4;
    run_epochs(&d, 2, &t);
    check_each(&t, 200, 2);
    d.num_workers = 5;
    run_epochs(&d, 2, &again);
    check_same(&t, &again);
    check_restore(&d, 2);
    CHECK_OK(ctx, mpt_loader_create(ctx, &d, &ld));
    CHECK_EQ_INT(mpt_loader_get_info(ld).num_records, 200);
    CHECK_EQ_INT(mpt_loader_get_info(ld).steps_per_epoch, 7); /* 50 a lane, 8 a step */
    mpt_loader_destroy(ld);
    labels[60] = 10;
    CHECK_CONTAINS(error_of(ctx, &d, MPT_ERR_INVALID_ARGUMENT), "array element 60: label 10");
    labels[60] = 0;
    y.dims[0] = 199;
    CHECK_CONTAINS(error_of(ctx, &d, MPT_ERR_INVALID_ARGUMENT), "array_labels");
    mpt_ctx_destroy(ctx);
}

MPT_TEST(mean_and_std_in_fp32_and_fp16) {
    static const uint8_t rgb[4 * 3] = {0, 128, 255, 10, 20, 30, 255, 255, 255, 1, 2, 3};
    static const float mean[3] = {0.485f, 0.456f, 0.406f}, std[3] = {0.229f, 0.224f, 0.225f};
    static const int32_t label = 3;
    mpt_tensor x, y;
    mpt_loader_desc d = raw_desc(NULL, 0);
    mpt_ctx *ctx = new_ctx();
    mpt_loader *ld = NULL;
    mpt_batch b;
    int i, half;
    memset(&x, 0, sizeof x);
    memset(&y, 0, sizeof y);
    x.data = (void *)(uintptr_t)rgb;
    x.dtype = MPT_U8;
    x.num_dims = 4;
    x.dims[0] = 1;
    x.dims[1] = x.dims[2] = 2;
    x.dims[3] = 3;
    y.data = (void *)(uintptr_t)&label;
    y.dtype = MPT_I32;
    y.num_dims = 1;
    y.dims[0] = 1;
    d.array_images = &x;
    d.array_labels = &y;
    d.channels = 3;
    d.batch_size = 2;
    memcpy(d.mean, mean, sizeof mean);
    memcpy(d.std, std, sizeof std);
    /* U8 can't be normalised */
    CHECK_CONTAINS(error_of(ctx, &d, MPT_ERR_INVALID_ARGUMENT), "mean and std");
    for (half = 0; half < 2; half++) {
        d.dtype = half ? MPT_F16 : MPT_F32;
        CHECK_OK(ctx, mpt_loader_create(ctx, &d, &ld));
        CHECK_OK(ctx, mpt_loader_next(ld, &b));
        CHECK_EQ_INT(b.num_valid, 1);
        CHECK_EQ_INT(b.images.dtype, d.dtype);
        for (i = 0; i < 24; i++) {
            double expected = i < 12 ? ((double)rgb[i] / 255 - (double)mean[i % 3]) /
                                           (double)std[i % 3]
                                     : 0;
            double got = half ? (double)mpt_f16_to_f32(((const uint16_t *)b.images.data)[i])
                              : (double)((const float *)b.images.data)[i];
            /* one rounding to 24 or 11 bits of a value below 4 */
            CHECK_NEAR(got, expected, half ? 4.0 / 2048 / 2 : 4.0 / 16777216 / 2);
        }
        CHECK_EQ_INT(((const int32_t *)b.labels.data)[0], 3);
        CHECK_EQ_INT(((const int32_t *)b.labels.data)[1], -1); /* the slot that doesn't count */
        mpt_loader_destroy(ld);
    }
    mpt_ctx_destroy(ctx);
}

/* Gradient pictures: pixel (y, x) of a 16 x 16 array element is 16 y + x, so that a crop shows
   where it came from. */
typedef struct gradient_set {
    uint8_t pixels[64][256];
    int32_t labels[64];
    mpt_tensor x, y;
} gradient_set;

static void make_gradients(gradient_set *g) {
    int i, k;
    memset(g, 0, sizeof *g);
    for (i = 0; i < 64; i++)
        for (k = 0; k < 256; k++) g->pixels[i][k] = (uint8_t)k;
    g->x.data = g->pixels;
    g->x.dtype = MPT_U8;
    g->x.num_dims = 4;
    g->x.dims[0] = 64;
    g->x.dims[1] = g->x.dims[2] = 16;
    g->x.dims[3] = 1;
    g->y.data = g->labels;
    g->y.dtype = MPT_I32;
    g->y.num_dims = 1;
    g->y.dims[0] = 64;
}

/* Pictures of one epoch by record: out[record][pixel]. */
static void pictures_by_record(const mpt_loader_desc *d, int epoch, uint8_t out[64][256]) {
    mpt_ctx *ctx = new_ctx();
    mpt_loader *ld = NULL;
    mpt_batch b;
    mpt_result rc;
    CHECK_OK(ctx, mpt_loader_create(ctx, d, &ld));
    while (mpt_loader_get_info(ld).epoch <= epoch) {
        rc = mpt_loader_next(ld, &b);
        CHECK(rc >= 0);
        if (rc == MPT_OK && b.epoch == epoch) {
            int slot, lane, capacity = (int)b.images.dims[0] / b.num_lanes;
            for (slot = 0; slot < (int)b.images.dims[0]; slot++) {
                lane = slot / capacity;
                if (slot % capacity >= b.lane_valid[lane]) continue;
                memcpy(out[b.sample_ids[slot]], (const uint8_t *)b.images.data + slot * 256, 256);
            }
        }
    }
    mpt_loader_destroy(ld);
    mpt_ctx_destroy(ctx);
}

MPT_TEST(O24_augmentation_is_keyed_by_seed_epoch_and_record) {
    static gradient_set g;
    static uint8_t a[64][256], b[64][256], c[64][256];
    static const mpt_augment kinds[2] = {MPT_AUGMENT_CROP_FLIP, MPT_AUGMENT_IMAGENET};
    mpt_loader_desc d = raw_desc(NULL, 0);
    int kind, i, k, same_epoch = 0, same_pair = 0, flips = 0;
    make_gradients(&g);
    d.array_images = &g.x;
    d.array_labels = &g.y;
    d.height = d.width = 16;
    for (kind = 0; kind < 2; kind++) {
        d.augment = kinds[kind];
        d.num_workers = 1;
        d.num_lanes = 1;
        pictures_by_record(&d, 0, a);
        d.num_workers = 4;
        d.num_lanes = 4;
        pictures_by_record(&d, 0, b);
        CHECK_EQ_MEM(a, b, sizeof a); /* nor do lanes or ranks matter */
        pictures_by_record(&d, 1, c);
        for (i = 0; i < 64; i++) {
            same_epoch += !memcmp(a[i], c[i], 256);
            for (k = 0; k < i; k++) same_pair += !memcmp(a[i], a[k], 256);
        }
        /* 162 crops and flips, or far more: a few meet by chance, most differ */
        CHECK(same_epoch < 8);
        CHECK(same_pair < 64);
        same_epoch = same_pair = 0;
    }
    d.augment = MPT_AUGMENT_FLIP;
    pictures_by_record(&d, 0, a);
    for (i = 0; i < 64; i++) {
        CHECK(a[i][0] == 0 || a[i][0] == 15);
        flips += a[i][0] == 15;
    }
    /* 32 expected, standard deviation 4: chance of failing 6e-5, and fixed by the seed */
    CHECK(flips > 16 && flips < 48);
}

MPT_TEST(crop_flip_moves_inside_a_black_frame) {
    static gradient_set g;
    static uint8_t a[64][256];
    static int seen[9][9];
    mpt_loader_desc d = raw_desc(NULL, 0);
    int i, y, x, places = 0;
    make_gradients(&g);
    d.array_images = &g.x;
    d.array_labels = &g.y;
    d.height = d.width = 16;
    d.augment = MPT_AUGMENT_CROP_FLIP;
    pictures_by_record(&d, 0, a);
    for (i = 0; i < 64; i++) {
        int flip, dx, dy, fits = 0;
        for (flip = 0; flip < 2; flip++)
            for (dy = -4; dy <= 4; dy++)
                for (dx = -4; dx <= 4; dx++) {
                    int ok = 1;
                    for (y = 0; y < 16 && ok; y++)
                        for (x = 0; x < 16 && ok; x++) {
                            int from_y = y + dy, from_x = (flip ? 15 - x : x) + dx;
                            int inside = from_y >= 0 && from_y < 16 && from_x >= 0 && from_x < 16;
                            ok = a[i][y * 16 + x] == (inside ? from_y * 16 + from_x : 0);
                        }
                    if (!ok) continue;
                    fits++;
                    places += !seen[dy + 4][dx + 4]++;
                }
        CHECK_EQ_INT(fits, 1);
    }
    CHECK(places > 30); /* 64 draws from 81 places hit about 44 different ones */
}

MPT_TEST(fixtures_of_both_schemas_decode) {
    const char *imagenet = mpt_test_data("imagenet-*"),
               *tfds = mpt_test_data("tfds-00000-of-00001.tfrecord");
    mpt_ctx *ctx = new_ctx();
    mpt_loader_desc d;
    mpt_loader *ld = NULL;
    mpt_batch b;
    mpt_result rc;
    int n = 0;
    memset(&d, 0, sizeof d);
    d.paths = &imagenet;
    d.num_paths = 1;
    d.height = d.width = 32;
    d.channels = 3;
    d.num_classes = 10;
    d.augment = MPT_AUGMENT_CROP_FLIP;
    CHECK_OK(ctx, mpt_loader_create(ctx, &d, &ld));
    CHECK_EQ_INT(mpt_loader_get_info(ld).num_records, 100);
    CHECK_EQ_INT(mpt_loader_get_info(ld).label_offset, 1);
    while ((rc = mpt_loader_next(ld, &b)) == MPT_OK) n += (int)b.num_valid;
    CHECK_RESULT(ctx, rc, MPT_END);
    CHECK_EQ_INT(n, 100);
    mpt_loader_destroy(ld);
    d.paths = &tfds;
    d.augment = MPT_AUGMENT_IMAGENET;
    d.height = d.width = 24;
    CHECK_OK(ctx, mpt_loader_create(ctx, &d, &ld));
    CHECK_EQ_INT(mpt_loader_get_info(ld).label_offset, 0);
    for (n = 0; (rc = mpt_loader_next(ld, &b)) == MPT_OK;) n += (int)b.num_valid;
    CHECK_RESULT(ctx, rc, MPT_END);
    CHECK_EQ_INT(n, 50);
    mpt_loader_destroy(ld);
    mpt_ctx_destroy(ctx);
}

MPT_TEST(desc_errors_name_the_field) {
    const char *path = "x";
    mpt_ctx *ctx = new_ctx();
    mpt_loader_desc d = raw_desc(&path, 1), e;
    e = d;
    e.num_paths = 0;
    CHECK_CONTAINS(error_of(ctx, &e, MPT_ERR_INVALID_ARGUMENT), "paths");
    e = d;
    e.height = 0;
    CHECK_CONTAINS(error_of(ctx, &e, MPT_ERR_INVALID_ARGUMENT), "height");
    e = d;
    e.channels = 2;
    CHECK_CONTAINS(error_of(ctx, &e, MPT_ERR_INVALID_ARGUMENT), "channels");
    e = d;
    e.num_classes = 0;
    CHECK_CONTAINS(error_of(ctx, &e, MPT_ERR_INVALID_ARGUMENT), "num_classes");
    e = d;
    e.batch_size = -1;
    CHECK_CONTAINS(error_of(ctx, &e, MPT_ERR_INVALID_ARGUMENT), "batch_size");
    e = d;
    e.rank = 1;
    CHECK_CONTAINS(error_of(ctx, &e, MPT_ERR_INVALID_ARGUMENT), "rank");
    e = d;
    e.world_size = 2;
    e.num_lanes = 3;
    CHECK_CONTAINS(error_of(ctx, &e, MPT_ERR_INVALID_ARGUMENT), "num_lanes");
    e = d;
    e.dtype = MPT_I64;
    CHECK_CONTAINS(error_of(ctx, &e, MPT_ERR_INVALID_ARGUMENT), "dtype");
    mpt_ctx_destroy(ctx);
}

/* ---- what a hostile reader found ----------------------------------------------------------------
   Each was a bug once. */

#ifdef MPTRAIN_ZLIB
/* A plain file, damaged at one byte, then compressed: the framing inside is whole. */
static void write_damaged_gzip(mpt_ctx *ctx, const char *path, int n, int bad_record) {
    size_t size;
    uint8_t *bytes;
    gzFile gz;
    write_shard(ctx, path, 0, n, MPT_COMPRESSION_NONE);
    bytes = mpt_test_read_file(path, &size);
    bytes[size / (size_t)n * (size_t)bad_record + 14] ^= 1; /* in the payload */
    gz = gzopen(path, "wb");
    CHECK(gz && gzwrite(gz, bytes, (unsigned)size) == (int)size && gzclose(gz) == Z_OK);
    free(bytes);
}

MPT_TEST(a_bad_record_of_another_lane_shifts_nothing) {
    static trace t;
    static bad_log log;
    mpt_ctx *ctx = new_ctx();
    const char *path = mpt_test_tmpfile("shift.gz");
    mpt_loader_desc d = raw_desc(&path, 1);
    int lanes, policy, i;
    write_damaged_gzip(ctx, path, 40, 10);
    d.bad_record = note_bad;
    d.bad_record_user = &log;
    for (lanes = 1; lanes <= 4; lanes++)
        for (policy = MPT_BAD_RECORD_SKIP; policy <= MPT_BAD_RECORD_SKIP_FILE; policy++) {
            memset(&log, 0, sizeof log);
            d.num_lanes = lanes;
            d.on_bad_record = (mpt_on_bad_record)policy;
            run_epochs(&d, 1, &t);
            CHECK_EQ_INT(log.n, 1);
            CHECK_EQ_INT(log.record[0], 10);
            CHECK_EQ_INT(t.records, policy == MPT_BAD_RECORD_SKIP ? 39 : 10);
            for (i = 0; i < t.n; i++) CHECK(t.ids[i] != 10);
        }
    mpt_ctx_destroy(ctx);
}
#endif

MPT_TEST(a_state_whose_records_are_gone_fails_cleanly) {
    mpt_ctx *ctx = new_ctx();
    const char *path = mpt_test_tmpfile("gone.tfrecord");
    mpt_loader_desc d = raw_desc(&path, 1);
    mpt_loader *ld = NULL;
    mpt_bytes state;
    mpt_batch b;
    uint8_t *kept;
    int i;
    write_shard(ctx, path, 0, 1000, MPT_COMPRESSION_NONE);
    d.shuffle_buffer = 200;
    CHECK_OK(ctx, mpt_loader_create(ctx, &d, &ld));
    CHECK_OK(ctx, mpt_loader_next(ld, &b));
    CHECK_OK(ctx, mpt_loader_get_state(ld, &state));
    kept = (uint8_t *)malloc(state.size);
    memcpy(kept, state.data, state.size);
    state.data = kept;
    for (i = 0; i < 60; i++) CHECK_OK(ctx, mpt_loader_next(ld, &b));
    CHECK(truncate(path, 2000) == 0);
    CHECK_RESULT(ctx, mpt_loader_set_state(ld, state), MPT_ERR_CORRUPT_DATA);
    CHECK_RESULT(ctx, mpt_loader_next(ld, &b), MPT_ERR_CORRUPT_DATA);
    mpt_loader_destroy(ld);
    free(kept);
    mpt_ctx_destroy(ctx);
}

MPT_TEST(a_lane_may_stand_in_a_state_once_only) {
    static const int counts[2] = {60, 60};
    mpt_ctx *ctx = new_ctx();
    const char *folder = new_folder("twice");
    mpt_loader_desc d = raw_desc(&folder, 1);
    mpt_loader *ld = NULL;
    mpt_bytes state, twice;
    uint8_t *bytes;
    mpt_batch b;
    write_set(ctx, folder, counts, 2, MPT_COMPRESSION_NONE);
    d.num_lanes = d.world_size = 2;
    CHECK_OK(ctx, mpt_loader_create(ctx, &d, &ld));
    CHECK_OK(ctx, mpt_loader_next(ld, &b));
    CHECK_OK(ctx, mpt_loader_get_state(ld, &state));
    bytes = (uint8_t *)malloc(2 * state.size);
    memcpy(bytes, state.data, state.size);
    memcpy(bytes + state.size, state.data, state.size);
    twice.data = bytes;
    twice.size = 2 * state.size;
    mpt_loader_destroy(ld);
    d.world_size = 1;
    CHECK_OK(ctx, mpt_loader_create(ctx, &d, &ld));
    CHECK_RESULT(ctx, mpt_loader_set_state(ld, twice), MPT_ERR_INVALID_ARGUMENT);
    CHECK_CONTAINS(mpt_last_error(ctx)->message, "lane 0 twice");
    mpt_loader_destroy(ld);
    free(bytes);
    mpt_ctx_destroy(ctx);
}

MPT_TEST(O10_labels_at_the_ends_of_int64) {
    static const int64_t highest[1] = {INT64_MAX}, lowest[1] = {INT64_MIN};
    mpt_ctx *ctx = new_ctx();
    const char *path = mpt_test_tmpfile("ends.tfrecord");
    mpt_loader_desc d = raw_desc(&path, 1);
    write_labels(ctx, path, "image", "label", highest, 1);
    d.label_offset = -1;
    error_of(ctx, &d, MPT_ERR_INVALID_ARGUMENT);
    d.label_offset = INT_MIN;
    error_of(ctx, &d, MPT_ERR_INVALID_ARGUMENT);
    write_labels(ctx, path, "image", "label", lowest, 1);
    error_of(ctx, &d, MPT_ERR_INVALID_ARGUMENT);
    d.label_offset = INT_MAX;
    error_of(ctx, &d, MPT_ERR_INVALID_ARGUMENT);
    mpt_ctx_destroy(ctx);
}

MPT_TEST(an_index_that_joins_records_is_found_out) {
    mpt_ctx *ctx = new_ctx();
    const char *path = mpt_test_tmpfile("joined.tfrecord");
    mpt_loader_desc d = raw_desc(&path, 1);
    char idx[1300], text[4000];
    size_t size, used = 0;
    int i;
    write_shard(ctx, path, 0, 40, MPT_COMPRESSION_NONE);
    free(mpt_test_read_file(path, &size));
    size /= 40;
    for (i = 0; i < 40; i++) { /* records 10 and 11 stand as one */
        int joined = i == 10;
        used += (size_t)snprintf(text + used, sizeof text - used, "%zu %zu\n", (size_t)i * size,
                                 joined ? 2 * size : size);
        i += joined;
    }
    snprintf(idx, sizeof idx, "%s.idx", path);
    mpt_test_write_file(idx, text, used);
    d.num_lanes = 2;
    CHECK_CONTAINS(error_of(ctx, &d, MPT_ERR_CORRUPT_DATA), "make the index anew");
    mpt_ctx_destroy(ctx);
}

MPT_TEST(storage_without_seek_serves_lanes_and_restore) {
    static const int counts[2] = {700, 800};
    static trace t;
    shaky s;
    mpt_ctx *ctx = new_ctx();
    const char *folder = new_folder("noseek");
    mpt_loader_desc d = raw_desc(&folder, 1);
    write_set(ctx, folder, counts, 2, MPT_COMPRESSION_NONE);
    shaky_init(&s);
    s.io.seek = NULL;
    d.io = &s.io;
    d.batch_size = 100;
    d.num_lanes = 2;
    run_epochs(&d, 1, &t);
    check_each(&t, 1500, 1);
    check_restore(&d, 7);
    mpt_ctx_destroy(ctx);
}

MPT_TEST(a_file_that_became_shorter_is_damaged_data) {
    static bad_log log;
    mpt_ctx *ctx = new_ctx();
    const char *path = mpt_test_tmpfile("shorter.tfrecord");
    mpt_loader_desc d = raw_desc(&path, 1);
    mpt_loader *ld = NULL;
    mpt_batch b;
    mpt_result rc = MPT_OK;
    size_t size;
    int epoch;
    write_shard(ctx, path, 0, 3000, MPT_COMPRESSION_NONE);
    memset(&log, 0, sizeof log);
    d.num_lanes = 2;
    d.on_bad_record = MPT_BAD_RECORD_SKIP;
    d.bad_record = note_bad;
    d.bad_record_user = &log;
    CHECK_OK(ctx, mpt_loader_create(ctx, &d, &ld));
    free(mpt_test_read_file(path, &size));
    CHECK(truncate(path, (off_t)(size / 4)) == 0);
    for (epoch = 0; epoch < 2; epoch++) {
        while ((rc = mpt_loader_next(ld, &b)) == MPT_OK) continue;
        CHECK_RESULT(ctx, rc, MPT_END);
    }
    CHECK(log.n >= 2 && log.n <= 4); /* each lane once an epoch, but for what was read ahead */
    CHECK(strstr(log.cause[log.n - 1], "changed") || strstr(log.cause[log.n - 1], "cut"));
    mpt_loader_destroy(ld);
    mpt_ctx_destroy(ctx);
}

MPT_TEST(steps_of_each_epoch_are_told_before_it) {
    static int counts[40];
    mpt_ctx *ctx = new_ctx();
    const char *folder = new_folder("steps");
    mpt_loader_desc d = raw_desc(&folder, 1);
    mpt_loader *ld = NULL;
    mpt_batch b;
    int i, epoch;
    for (i = 0; i < 40; i++) counts[i] = 1 + i * 7 % 31;
    write_set(ctx, folder, counts, 40, MPT_COMPRESSION_NONE);
    d.num_lanes = 2;
    CHECK_OK(ctx, mpt_loader_create(ctx, &d, &ld));
    for (epoch = 0; epoch < 4; epoch++) {
        int64_t promised = mpt_loader_get_info(ld).steps_per_epoch, steps = 0;
        while (mpt_loader_next(ld, &b) == MPT_OK) steps++;
        CHECK_EQ_INT(steps, promised);
    }
    mpt_loader_destroy(ld);
    mpt_ctx_destroy(ctx);
}

MPT_TEST(hostile_dataset_info_is_passed_over) {
    static const char *const texts[] = {
        ("{\"splits\":[{\"name\":\"train\",\"shardLengths\":[\"9223372036854775790\","
         "\"9223372036854775790\"]}]}"),
        "{\"splits\":[{\"name\":\"train\",\"shardLengths\":[\"-1\",\"30\"]}]}",
        "{\"splits\":[{\"name\":\"train\",\"shardLengths\":[30",
        "[]",
        "\x00\xff",
        "{\"splits\":7}"};
    mpt_ctx *ctx = new_ctx();
    const char *folder = new_folder("info");
    mpt_loader_desc d = raw_desc(&folder, 1);
    mpt_loader *ld = NULL;
    char path[1300];
    size_t i;
    for (i = 0; i < 2; i++) {
        snprintf(path, sizeof path, "%s/x-train.tfrecord-%05d-of-00002", folder, (int)i);
        write_shard(ctx, path, (int)i * 30, 30, MPT_COMPRESSION_NONE);
    }
    for (i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        mpt_test_write_file(mpt_test_join(folder, "dataset_info.json"), texts[i], strlen(texts[i]));
        CHECK_OK(ctx, mpt_loader_create(ctx, &d, &ld));
        CHECK_EQ_INT(mpt_loader_get_info(ld).num_records, 60);
        CHECK_EQ_INT(mpt_loader_get_info(ld).num_records_source, MPT_COUNT_HEADERS);
        mpt_loader_destroy(ld);
    }
    mpt_ctx_destroy(ctx);
}

MPT_TEST(names_with_signs_in_them) {
    static trace t;
    mpt_ctx *ctx = new_ctx();
    char folder[1300], path[1500];
    const char *name = path;
    mpt_loader_desc d = raw_desc(&name, 1);
    snprintf(folder, sizeof folder, "%s", new_folder("run@2"));
    snprintf(path, sizeof path, "%s/f.tfrecord@3", folder);
    write_shard(ctx, path, 0, 12, MPT_COMPRESSION_NONE);
    run_epochs(&d, 1, &t); /* the file of that very name */
    check_each(&t, 12, 1);
    name = folder;
    run_epochs(&d, 1, &t); /* the folder of that very name */
    check_each(&t, 12, 1);
    snprintf(folder, sizeof folder, "%s", new_folder("data[1]*"));
    snprintf(path, sizeof path, "%s/x.tfrecord", folder);
    write_shard(ctx, path, 0, 12, MPT_COMPRESSION_NONE);
    snprintf(path, sizeof path, "%s/dataset_info.json", folder);
    mpt_test_write_file(path, "{}", 2);
    run_epochs(&d, 1, &t); /* a folder, whatever its name looks like */
    check_each(&t, 12, 1);
    name = "nothing@99999999"; /* refused at once, not after a list of so many names */
    CHECK_CONTAINS(error_of(ctx, &d, MPT_ERR_IO), "no such file");
    mpt_ctx_destroy(ctx);
}

MPT_TEST(O28_memory_follows_the_shuffle_buffer_and_not_the_file) {
    static uint8_t payload[100 * 1024];
    mpt_ctx *ctx;
    const char *path = mpt_test_tmpfile("o28.tfrecord");
    mpt_tfrecord_writer *w;
    mpt_example *e = NULL;
    mpt_loader_desc d = raw_desc(&path, 1);
    mpt_loader *ld = NULL;
    mpt_bytes value;
    mpt_batch b;
    mpt_result rc;
    struct rusage usage;
    int64_t label = 1;
    int i, n = 0;
    if (!mpt_test_full()) SKIP("writes a file of 1 GiB: MPT_TEST_FULL=1");
    if (SANITIZED) SKIP("sanitizers take memory of their own");
    ctx = new_ctx();
    w = open_writer(ctx, path, MPT_COMPRESSION_NONE);
    CHECK_OK(ctx, mpt_example_create(ctx, &e));
    value.data = payload;
    value.size = sizeof payload;
    for (i = 0; i < 10486; i++) {
        payload[i % sizeof payload] ^= (uint8_t)i;
        CHECK_OK(ctx, mpt_example_add_bytes(e, "image", &value, 1));
        CHECK_OK(ctx, mpt_example_add_int64s(e, "label", &label, 1));
        write_example(ctx, w, e);
    }
    CHECK_OK(ctx, mpt_tfrecord_writer_finish(w));
    mpt_tfrecord_writer_close(w);
    mpt_example_destroy(e);
    d.height = 320;
    d.width = 320;
    d.shuffle_buffer = 100;
    d.num_workers = 4;
    d.num_records = 10486;
    CHECK_OK(ctx, mpt_loader_create(ctx, &d, &ld));
    while ((rc = mpt_loader_next(ld, &b)) == MPT_OK) n += (int)b.num_valid;
    CHECK_RESULT(ctx, rc, MPT_END);
    CHECK_EQ_INT(n, 10486);
    mpt_loader_destroy(ld);
    CHECK(getrusage(RUSAGE_SELF, &usage) == 0);
    CHECK(usage.ru_maxrss < 200 * 1024);
    mpt_ctx_destroy(ctx);
}

static const mpt_test_case tests[] = {
    /* first: RSS is a maximum */
    MPT_TEST_CASE(O28_memory_follows_the_shuffle_buffer_and_not_the_file),
    MPT_TEST_CASE(O22_each_record_once_whatever_the_workers),
    MPT_TEST_CASE(O22_each_record_once_whatever_the_lanes),
    MPT_TEST_CASE(whole_files_are_dealt_when_there_are_many),
    MPT_TEST_CASE(lanes_are_the_same_for_1_2_4_ranks),
    MPT_TEST_CASE(O26_order_depends_on_the_seed_alone),
    MPT_TEST_CASE(epochs_differ_in_order),
    MPT_TEST_CASE(without_shuffle_records_come_in_file_order),
    MPT_TEST_CASE(O23_last_batch_is_kept_dropped_or_padded),
    MPT_TEST_CASE(O23_every_rank_counts_its_own_records_once),
    MPT_TEST_CASE(O25_each_epoch_is_a_new_partition_over_the_ranks),
    MPT_TEST_CASE(nothing_usable_is_an_error_on_any_rank),
    MPT_TEST_CASE(restore_goes_on_bit_for_bit),
    MPT_TEST_CASE(restore_of_whole_files_and_compressed_files),
    MPT_TEST_CASE(state_of_four_ranks_goes_on_with_two),
    MPT_TEST_CASE(a_state_that_cannot_be_written_changes_nothing),
    MPT_TEST_CASE(a_foreign_or_damaged_state_is_refused),
    MPT_TEST_CASE(O17_bad_pictures_are_skipped_counted_and_limited),
    MPT_TEST_CASE(O17_policies_on_damaged_framing),
    MPT_TEST_CASE(damage_gives_the_same_records_in_any_lanes),
    MPT_TEST_CASE(O08_missing_and_wrong_features_are_named),
    MPT_TEST_CASE(O09_an_empty_list_is_a_missing_value),
    MPT_TEST_CASE(O10_labels_out_of_range_are_errors_that_no_policy_skips),
    MPT_TEST_CASE(O11_label_offset_follows_the_schema_and_contradictions_are_loud),
    MPT_TEST_CASE(O12_base64_and_raw_pixels_are_recognised),
    MPT_TEST_CASE(O04_empty_shards_and_empty_sets),
    MPT_TEST_CASE(names_globs_directories_and_shard_sets),
    MPT_TEST_CASE(counts_come_from_the_best_source),
    MPT_TEST_CASE(a_stale_index_is_said_and_passed_over),
    MPT_TEST_CASE(O27_few_descriptors_and_none_left_open),
    MPT_TEST_CASE(every_stop_joins_threads_and_closes_files),
    MPT_TEST_CASE(O29_short_reads_and_interrupts_lose_nothing),
    MPT_TEST_CASE(O29_storage_that_fails_for_good_is_no_corruption),
    MPT_TEST_CASE(every_failing_read_is_an_error_or_repaired),
    MPT_TEST_CASE(every_failing_allocation_is_an_error_and_leaks_nothing),
    MPT_TEST_CASE(arrays_are_batched_like_files),
    MPT_TEST_CASE(mean_and_std_in_fp32_and_fp16),
    MPT_TEST_CASE(O24_augmentation_is_keyed_by_seed_epoch_and_record),
    MPT_TEST_CASE(crop_flip_moves_inside_a_black_frame),
    MPT_TEST_CASE(fixtures_of_both_schemas_decode),
    MPT_TEST_CASE(desc_errors_name_the_field),
#ifdef MPTRAIN_ZLIB
    MPT_TEST_CASE(a_bad_record_of_another_lane_shifts_nothing),
#endif
    MPT_TEST_CASE(a_state_whose_records_are_gone_fails_cleanly),
    MPT_TEST_CASE(a_lane_may_stand_in_a_state_once_only),
    MPT_TEST_CASE(O10_labels_at_the_ends_of_int64),
    MPT_TEST_CASE(an_index_that_joins_records_is_found_out),
    MPT_TEST_CASE(storage_without_seek_serves_lanes_and_restore),
    MPT_TEST_CASE(a_file_that_became_shorter_is_damaged_data),
    MPT_TEST_CASE(steps_of_each_epoch_are_told_before_it),
    MPT_TEST_CASE(hostile_dataset_info_is_passed_over),
    MPT_TEST_CASE(names_with_signs_in_them),
};

int main(int argc, char **argv) {
    return mpt_test_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
