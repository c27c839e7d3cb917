/* The program predict: the numbers it prints are those of mpt_predict; what a file of weights tells
   about its network, what options override; bad pictures, bad files, drawing. Nothing is trained:
   weights are those that a new trainer begins with. */
#define MPTRAIN_IMPLEMENTATION
#include "mptrain.h"

#include "program.h"

enum { SIZE = 12, CHANNELS = 3, CLASSES = 7, RECORDS = 10 };
static const float test_mean[3] = {0.5f, 0.25f, 0.125f}, test_std[3] = {0.5f, 0.25f, 1.0f};

/* What the program has to be told where the file has no metadata. */
#define LENET "--arch lenet --image-size 12 --channels 3 --num-classes 7"
#define CONSTANTS "--mean 0.5,0.25,0.125 --std 0.5,0.25,1"

/* ---- what is predicted ----------------------------------------------------------------------- */
static mpt_ctx *test_ctx;

/* A BMP of noise, 24 bits; the size in bytes. */
static size_t noise_bmp(unsigned char *b, int width, int height, unsigned seed) {
    size_t size = bmp_head(b, width, height), i;

    for (i = 54; i < size; i++) {
        seed = seed * 1664525u + 1013904223u;
        b[i] = (unsigned char)(seed >> 24);
    }
    return size;
}

/* Records r = 0 .. n-1, of class r % CLASSES; the picture of each is also a file "r.bmp". Record
   `bad`, if there is one, holds no picture. */
static void write_pictures(const char *name, int n, int bad) {
    unsigned char b[54 + 40 * 40 * 3];
    mpt_tfrecord_writer_desc desc;
    mpt_tfrecord_writer *w = NULL;
    mpt_example *e = NULL;
    mpt_bytes value;
    char file[32];
    int i;

    memset(&desc, 0, sizeof desc);
    desc.path = work_file(name);
    CHECK_OK(test_ctx, mpt_tfrecord_writer_open(test_ctx, &desc, &w));
    CHECK_OK(test_ctx, mpt_example_create(test_ctx, &e));
    for (i = 0; i < n; i++) {
        int64_t label = i % CLASSES;
        value.data = b;
        value.size = noise_bmp(b, SIZE + i, SIZE + 2 * i % 7, (unsigned)i);
        snprintf(file, sizeof file, "%d.bmp", i);
        mpt_test_write_file(work_file(file), b, value.size);
        if (i == bad) b[0] = 'X';
        mpt_example_clear(e);
        CHECK_OK(test_ctx, mpt_example_add_bytes(e, "image", &value, 1));
        CHECK_OK(test_ctx, mpt_example_add_int64s(e, "label", &label, 1));
        CHECK_OK(test_ctx, mpt_example_encode(e, &value));
        CHECK_OK(test_ctx, mpt_tfrecord_writer_write(w, value));
    }
    CHECK_OK(test_ctx, mpt_tfrecord_writer_finish(w));
    mpt_tfrecord_writer_close(w);
    mpt_example_destroy(e);
}

/* Exports a new trainer's weights and predicts the records with it, into p: (n,CLASSES). */
static void export_and_predict(const char *arch, const char *weights, const char *records, int n,
                               float *p) {
    mpt_trainer_desc desc;
    mpt_export_desc out;
    mpt_loader_desc data;
    mpt_model *m = NULL;
    mpt_trainer *t = NULL;
    mpt_loader *loader = NULL;
    mpt_batch batch;
    const char *path = work_file(records);

    memset(&desc, 0, sizeof desc);
    desc.precision = MPT_PRECISION_FP32;
    desc.optimizer.learning_rate = 1;
    desc.seed = 5;
    CHECK_OK(test_ctx, mpt_model_create(test_ctx, SIZE, SIZE, CHANNELS, &m));
    CHECK_OK(test_ctx, mpt_model_finish(m, mpt_zoo(m, arch, CLASSES)));
    CHECK_OK(test_ctx, mpt_trainer_create(m, &desc, n, &t));
    memset(&out, 0, sizeof out);
    out.path = work_file(weights);
    CHECK_OK(test_ctx, mpt_trainer_export(t, &out));
    memset(&data, 0, sizeof data);
    data.paths = &path;
    data.num_paths = 1;
    data.batch_size = n;
    data.height = data.width = SIZE;
    data.channels = CHANNELS;
    data.num_classes = CLASSES;
    data.no_shuffle = 1;
    memcpy(data.mean, test_mean, sizeof data.mean);
    memcpy(data.std, test_std, sizeof data.std);
    CHECK_OK(test_ctx, mpt_loader_create(test_ctx, &data, &loader));
    CHECK_OK(test_ctx, mpt_loader_next(loader, &batch));
    CHECK_OK(test_ctx, mpt_predict(t, &batch, p));
    mpt_loader_destroy(loader);
    mpt_trainer_destroy(t);
    mpt_model_destroy(m);
}

/* The same weights in a file with metadata, pairs of key and value. */
static void add_metadata(const char *from, const char *to, const char *const (*pairs)[2], int n) {
    mpt_safetensors_desc in;
    mpt_safetensors_writer_desc out;
    mpt_safetensors *s = NULL;
    mpt_safetensors_writer *w = NULL;
    void *data[64];
    int64_t i;
    int k;

    memset(&in, 0, sizeof in);
    memset(&out, 0, sizeof out);
    in.path = work_file(from);
    CHECK_OK(test_ctx, mpt_safetensors_open(test_ctx, &in, &s));
    out.path = work_file(to);
    CHECK_OK(test_ctx, mpt_safetensors_writer_open(test_ctx, &out, &w));
    for (k = 0; k < n; k++)
        CHECK_OK(test_ctx, mpt_safetensors_writer_add_metadata(w, pairs[k][0], pairs[k][1]));
    CHECK(mpt_safetensors_count(s) <= 64);
    for (i = 0; i < mpt_safetensors_count(s); i++) {
        mpt_safetensors_info info;
        mpt_tensor t;
        CHECK_OK(test_ctx, mpt_safetensors_get(s, i, &info));
        data[i] = malloc(info.bytes + 1);
        CHECK_OK(test_ctx, mpt_safetensors_read(s, i, data[i], info.bytes));
        memset(&t, 0, sizeof t);
        t.data = data[i];
        t.dtype = info.dtype;
        t.num_dims = info.num_dims;
        for (k = 0; k < info.num_dims; k++) t.dims[k] = info.dims[k];
        CHECK_OK(test_ctx, mpt_safetensors_writer_add(w, info.name, &t));
    }
    CHECK_OK(test_ctx, mpt_safetensors_writer_finish(w));
    for (i = 0; i < mpt_safetensors_count(s); i++) free(data[i]);
    mpt_safetensors_writer_close(w);
    mpt_safetensors_close(s);
}

static void write_text(const char *name, const char *text) {
    mpt_test_write_file(work_file(name), text, strlen(text));
}

/* Line i of the last output holds the classes of p: (CLASSES), likeliest first, to the last bit. */
static void check_line(int i, int top, const float *p) {
    const char *at = run_out, *end;
    int k, c, class_number;
    float value, before = 2;
    double sum = 0;

    for (; i > 0; i--) at = strchr(at, '\n') + 1;
    end = strchr(at, '\n');
    for (k = 0; k < top; k++) {
        at = strstr(at, "{\"class\":");
        CHECK(at != NULL && at < end);
        CHECK_EQ_INT(sscanf(at, "{\"class\":%d", &class_number), 1);
        value = strtof(strstr(at, "\"probability\":") + 14, NULL);
        CHECK(class_number >= 0 && class_number < CLASSES && value == p[class_number]);
        CHECK(value <= before);
        before = value;
        at++;
    }
    at = strstr(at, "{\"class\":");
    CHECK(!at || at > end);
    for (c = 0; c < CLASSES; c++) sum += (double)p[c];
    CHECK_NEAR(sum, 1, 1e-5);
}

/* ---- cases ----------------------------------------------------------------------------------- */
MPT_TEST(records_and_pictures_as_the_library_has_them) {
    static const char *const archs[] = {"lenet", "resnet20"};
    float p[RECORDS * CLASSES];
    char label[32];
    int a, i;

    for (a = 0; a < 2; a++) {
        fresh_directory();
        write_pictures("data", RECORDS, -1);
        export_and_predict(archs[a], "w", "data", RECORDS, p);
        /* in pieces of four, on other numbers of threads */
        CHECK_RUNS("$P -w w -a %s --image-size 12 --channels 3 --num-classes 7 " CONSTANTS
                   " --json -b 4 --top 7 -j 3 --threads 3 --data data",
                   archs[a]);
        CHECK_EQ_INT(count_of(run_out, '\n'), RECORDS + 1);
        for (i = 0; i < RECORDS; i++) {
            check_line(i, 7, p + i * CLASSES);
            snprintf(label, sizeof label, "\"record\":%d,\"label\":%d,", i, i % CLASSES);
            CHECK_CONTAINS(run_out, label);
        }
        CHECK_CONTAINS(run_out, "{\"records\":10,\"accuracy\":");
        CHECK_EQ_STR(run_err, "");
        CHECK_RUNS("$P -w w -a %s --image-size 12 --channels 3 --num-classes 7 " CONSTANTS
                   " --json --top 2 2.bmp 9.bmp 0.bmp",
                   archs[a]);
        CHECK_EQ_INT(count_of(run_out, '\n'), 3);
        check_line(0, 2, p + 2 * CLASSES);
        check_line(1, 2, p + 9 * CLASSES);
        check_line(2, 2, p);
        CHECK_CONTAINS(run_out, "{\"file\":\"9.bmp\",\"predictions\":[");
    }
}

MPT_TEST(text_names_limits_and_scores) {
    float p[RECORDS * CLASSES];
    int i, c, best, right = 0;
    char line[200];

    fresh_directory();
    write_pictures("data", RECORDS, -1);
    write_text("names", "ant\r\nbee\ncat\ndog\nelk\nfox\ngnu\n");
    export_and_predict("lenet", "w", "data", RECORDS, p);
    for (i = 0; i < RECORDS; i++) {
        for (c = 1, best = 0; c < CLASSES; c++)
            if (p[i * CLASSES + c] > p[i * CLASSES + best]) best = c;
        right += best == i % CLASSES;
    }
    CHECK_RUNS("$P -w w " LENET " " CONSTANTS " --classes names --data data");
    CHECK_EQ_INT(count_of(run_out, '\n'), RECORDS + 1);
    CHECK_CONTAINS(run_out, "record 0, ant, ");
    CHECK_CONTAINS(run_out, "record 9, cat, ");
    snprintf(line, sizeof line, "10 records: %.2f %% right, ", 10.0 * right);
    CHECK_CONTAINS(run_out, line);
    CHECK_RUNS("$P -w w " LENET " " CONSTANTS " --data data --limit 3 --top 1");
    CHECK_EQ_INT(count_of(run_out, '\n'), 4);
    CHECK_CONTAINS(run_out, "record 2, class 2, ");
    CHECK_CONTAINS(run_out, "\n3 records: ");
    CHECK_RUNS("$P -w w " LENET " " CONSTANTS " --top 1 '-' 2>/dev/null; $P -w w " LENET
               " --precision fp16 0.bmp");
    CHECK_CONTAINS(run_out, "0.bmp: class ");
    CHECK_EQ_INT(count_of(run_out, ','), 4);
}

MPT_TEST(the_file_tells_its_network) {
    static const char *const pairs[][2] = {{"format", "pt"},
                                           {"mptrain.arch", "lenet"},
                                           {"mptrain.image_size", "12"},
                                           {"mptrain.channels", "3"},
                                           {"mptrain.num_classes", "7"},
                                           {"mptrain.mean", "0.5,0.25,0.125"},
                                           {"mptrain.std", "0.5,0.25,1"},
                                           {"mptrain.classes",
                                            "ant\nbee\ncat\ndog\nelk\nfox\ngnu"}};
    float p[RECORDS * CLASSES];

    fresh_directory();
    write_pictures("data", RECORDS, -1);
    export_and_predict("lenet", "w", "data", RECORDS, p);
    add_metadata("w", "told", pairs, 8);
    CHECK_RUNS("$P --weights told --json 1.bmp");
    check_line(0, 5, p + CLASSES);
    CHECK(strstr(run_out, "\"name\":\"bee\"") || strstr(run_out, "\"name\":\"ant\""));
    /* options win: another picture size doesn't fit this network's dense layer */
    CHECK_FAILS(1, "told: tensor fc1.weight has another shape",
                "$P --weights told --image-size 16 1.bmp");
    CHECK_RUNS("$P --weights told --json 1.bmp >a; $P --weights told --mean 0 --json 1.bmp >b; "
               "! cmp -s a b");
    write_text("names", "1\n2\n3\n4\n5\n6\n7");
    CHECK_RUNS("$P --weights told --classes names 1.bmp");
    CHECK(!strstr(run_out, "ant"));
}

/* What train exports is enough, for a network by name and for one that was described; and both
   programs count the same. */
MPT_TEST(what_train_exports_needs_no_options) {
    static const char *const archs[] = {"mlp", "net.txt"};
    double expected;
    int i;

    fresh_directory();
    write_pictures("data-00000-of-00001", RECORDS, -1);
    write_text("data-classes.txt", "ant\nbee\ncat\ndog\nelk\nfox\ngnu\n");
    write_text("net.txt", "conv 8 kernel 3\nbatchnorm\nrelu\nglobalavgpool\ndense classes\n");
    for (i = 0; i < 2; i++) {
        CHECK_RUNS(
            "$D/train --data data@1 --val-data data@1 -a %s --image-size 12 -b 5 --epochs 2 "
            "--augment none --precision fp32 --report r --export w.safetensors >/dev/null && cat r",
            archs[i]);
        expected = json_number(run_out, "val_accuracy");
        CHECK_RUNS("$P -w w.safetensors --data data@1 --json | tail -n 1");
        CHECK_NEAR(json_number(run_out, "accuracy"), expected, 1e-9);
        CHECK_RUNS("$P -w w.safetensors 0.bmp");
        CHECK_CONTAINS(run_out, "gnu ");
    }
    /* options win */
    CHECK_RUNS("$P -w w.safetensors --arch resnet20 --data data@1 >/dev/null; test $? = 1");
}

MPT_TEST(metadata_that_can_not_be) {
    static const char *const cases[][3] = {
        {"mptrain.description", "conv 3\nswish", "told:2: 'swish' is no layer"},
        {"mptrain.arch", "vgg16", "the network 'vgg16', which is none of lenet|"},
        {"mptrain.image_size", "12px", "'12px': no whole number from 1 to 4096"},
        {"mptrain.image_size", "0", "'0': no whole number"},
        {"mptrain.channels", "4", "'4': no whole number from 1 to 3"},
        {"mptrain.num_classes", "-7", "'-7': no whole number"},
        {"mptrain.mean", "0.5,0.5", "mptrain.mean '0.5,0.5': not one number, or 3 with commas"},
        {"mptrain.mean", "nan", "'nan': not one number"},
        {"mptrain.std", "0", "mptrain.std '0': not one number above 0"},
        {"mptrain.std", "1,,1", "'1,,1': not one number"},
        {"mptrain.classes", "a\nb", "2 names of classes for 7 classes"},
        {"mptrain.classes", "", "0 names of classes"},
    };
    const char *pairs[5][2] = {{"mptrain.arch", "lenet"},
                               {"mptrain.image_size", "12"},
                               {"mptrain.channels", "3"},
                               {"mptrain.num_classes", "7"},
                               {NULL, NULL}};
    float p[RECORDS * CLASSES];
    size_t i;
    int k;

    fresh_directory();
    write_pictures("data", RECORDS, -1);
    export_and_predict("lenet", "w", "data", RECORDS, p);
    for (i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const char *changed[5][2];
        int n = 4;
        memcpy(changed, pairs, sizeof changed);
        for (k = 0; k < 4 && strcmp(pairs[k][0], cases[i][0]) != 0; k++) continue;
        if (!strcmp(cases[i][0], "mptrain.description")) k = 0; /* instead of a name */
        changed[k][0] = cases[i][0];
        changed[k][1] = cases[i][1];
        if (k == 4) n = 5;
        add_metadata("w", "told", (const char *const(*)[2])changed, n);
        CHECK_FAILS(1, cases[i][2], "$P -w told 0.bmp");
    }
}

MPT_TEST(what_is_missing_is_named) {
    float p[RECORDS * CLASSES];

    fresh_directory();
    write_pictures("data", RECORDS, -1);
    export_and_predict("lenet", "w", "data", RECORDS, p);
    CHECK_FAILS(2,
                "w does not tell its network, picture size, number of channels, number of classes: "
                "give --arch --image-size --channels --num-classes",
                "$P -w w 0.bmp");
    CHECK_FAILS(2, "w does not tell its picture size, number of channels: give --image-size --chan",
                "$P -w w -a lenet --num-classes 7 0.bmp");
    CHECK_FAILS(2, "w does not tell its number of classes: give --num-classes\n",
                "$P -w w -a lenet --image-size 12 --channels 3 0.bmp");
    CHECK_FAILS(2, "1 channel (gray) or 3 (colour), not 2", "$P -w w " LENET " --channels 2 0.bmp");
    CHECK_FAILS(2, "--mean: '1,2' is not one number, or 3", "$P -w w " LENET " --mean 1,2 0.bmp");
    CHECK_FAILS(2, "--std: '-1' is not one number above 0", "$P -w w " LENET " --std -1 0.bmp");
    CHECK_FAILS(2, "needs --weights FILE", "$P 0.bmp");
    CHECK_FAILS(2, "needs pictures, or --data", "$P -w w");
    CHECK_FAILS(2, "not both", "$P 0.bmp -w w --data data");
    CHECK_FAILS(2, "--label-offset: 'one'", "$P -w w " LENET " --label-offset one --data data");
    CHECK_FAILS(2, "--arch: 'vgg' is none of lenet|", "$P -w w -a vgg 0.bmp");
    CHECK_FAILS(2, "--device cuda: this program was built without CUDA",
                "$P -w w " LENET " --device cuda 0.bmp");
    CHECK_FAILS(1, "gone: can't open it: no such file", "$P -w w " LENET " --classes gone 0.bmp");
    CHECK_FAILS(1, "missing", "$P -w missing " LENET " 0.bmp");
    CHECK_FAILS(1, "0.bmp", "$P -w 0.bmp " LENET " 0.bmp");
    CHECK_FAILS(1, "has another shape",
                "$P -w w -a resnet20 --image-size 12 --channels 3 "
                "--num-classes 7 0.bmp");
    CHECK_FAILS(1, "no such file", "$P -w w " LENET " --data nothing");
    CHECK_FAILS(1, "taken to run from 1",
                "$P -w w " LENET " --label-offset 1 --data data --limit 1");
    CHECK_FAILS(1, "no space left", "$P -w w " LENET " 0.bmp >/dev/full");
    CHECK_RUNS("$P --help");
    CHECK_CONTAINS(run_out, "--weights FILE");
    CHECK_RUNS("$P --version");
    CHECK_CONTAINS(run_out, "predict " MPT_VERSION_STRING);
}

MPT_TEST(a_bad_picture_stops_no_other) {
    float p[RECORDS * CLASSES];

    fresh_directory();
    write_pictures("data", RECORDS, -1);
    export_and_predict("lenet", "w", "data", RECORDS, p);
    write_text("text.jpg", "no picture");
    CHECK_FAILS(1, "text.jpg: this is text, not a picture",
                "$P -w w " LENET " " CONSTANTS " --json 3.bmp text.jpg 4.bmp");
    CHECK_EQ_INT(count_of(run_out, '\n'), 2);
    check_line(0, 5, p + 3 * CLASSES);
    check_line(1, 5, p + 4 * CLASSES);
    CHECK_FAILS(1, "missing.jpg: can't open it: no such file",
                "$P -w w " LENET " missing.jpg 0.bmp");
    CHECK_FAILS(1, ".: can't read it: it is a directory", "$P -w w " LENET " . 0.bmp");
    CHECK_CONTAINS(run_out, "0.bmp: class ");
    /* in records: left out, told, and exit code 1 in the end */
    write_pictures("data", RECORDS, 6);
    CHECK_FAILS(1, "record 6 ", "$P -w w " LENET " " CONSTANTS " --json --data data");
    CHECK_EQ_INT(count_of(run_out, '\n'), RECORDS);
    check_line(5, 5, p + 5 * CLASSES);
    check_line(6, 5, p + 7 * CLASSES);
}

/* Not on a terminal: ten shades, one for two rows, and nothing that moves a cursor. */
MPT_TEST(drawn_in_plain_characters) {
    float p[RECORDS * CLASSES];
    unsigned char b[54 + SIZE * SIZE * 3];
    size_t size = noise_bmp(b, SIZE, SIZE, 1);
    int i;

    fresh_directory();
    write_pictures("data", RECORDS, -1);
    export_and_predict("lenet", "w", "data", RECORDS, p);
    /* rows of a BMP stand from the bottom: lower half black, upper half white */
    memset(b + 54, 0, SIZE / 2 * SIZE * 3);
    memset(b + 54 + SIZE / 2 * SIZE * 3, 255, SIZE / 2 * SIZE * 3);
    mpt_test_write_file(work_file("half.bmp"), b, size);
    CHECK_RUNS("TERM=xterm $P -w w " LENET " " CONSTANTS " --top 2 --draw half.bmp");
    CHECK_CONTAINS(run_out, "@@@@@@@@@@@@  \n@@@@@@@@@@@@  half.bmp\n@@@@@@@@@@@@  \n            ");
    CHECK_CONTAINS(run_out, " %");
    for (i = 0; run_out[i]; i++)
        CHECK((run_out[i] >= ' ' && run_out[i] < 127) || run_out[i] == '\n');
    CHECK_RUNS("$P -w w " LENET " " CONSTANTS " --draw --limit 2 --data data");
    CHECK_CONTAINS(run_out, "  record 1, class 1, ");
}

static const mpt_test_case tests[] = {
    MPT_TEST_CASE(records_and_pictures_as_the_library_has_them),
    MPT_TEST_CASE(text_names_limits_and_scores),
    MPT_TEST_CASE(the_file_tells_its_network),
    MPT_TEST_CASE(what_train_exports_needs_no_options),
    MPT_TEST_CASE(metadata_that_can_not_be),
    MPT_TEST_CASE(what_is_missing_is_named),
    MPT_TEST_CASE(a_bad_picture_stops_no_other),
    MPT_TEST_CASE(drawn_in_plain_characters),
};

int main(int argc, char **argv) {
    int code = 1;

    if (mpt_ctx_create(NULL, &test_ctx) == MPT_OK)
        code = mpt_test_main(argc, argv, tests, sizeof(tests) / sizeof(tests[0]));
    mpt_ctx_destroy(test_ctx);
    return code;
}
