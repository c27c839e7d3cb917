/* predict - what a trained network sees in pictures

   A program on mptrain's public interface only. Its parts, in reading order:
       common/cli.h         flags, JSON
       common/buffer.h      whole files
       common/network.h     words for networks and devices, networks described in text
       predict/network.h    which network a file of weights is of
       predict/draw.h       pictures as characters
       predict/show.h       predictions as text or JSON
   Build: cc -O2 -I. -Iexamples -DMPTRAIN_ZLIB examples/predict.c -o predict -lz -lm -lpthread */
#define MPTRAIN_IMPLEMENTATION
#include "mptrain.h"

#include "predict/show.h"

/* ---- batches ------------------------------------------------------------------------------------
   Both kinds of input go through a loader, so a picture is fitted as in training. */
static mpt_loader_desc predict_loader_desc(const predict_options *o, const predict_network *n) {
    mpt_loader_desc d;
    int c;

    memset(&d, 0, sizeof d);
    d.batch_size = n->batch_size;
    d.height = d.width = n->size;
    d.channels = n->channels;
    d.num_classes = n->num_classes;
    d.num_workers = (int)o->workers;
    d.no_shuffle = 1;
    d.interleave = 1;
    for (c = 0; c < 3; c++) {
        d.mean[c] = n->mean[c];
        d.std[c] = n->std[c];
    }
    return d;
}

/* Shows the records of a batch, at most `limit`; the number of them, or -1 after the message. */
static int64_t predict_batch(const predict_options *o, const predict_network *n,
                             const mpt_batch *batch, predict_item item, int64_t limit,
                             float *probabilities, predict_score *score) {
    size_t picture = (size_t)n->size * (size_t)n->size * (size_t)n->channels;
    int64_t i, count = batch->num_valid < limit ? batch->num_valid : limit;

    if (mpt_predict(n->trainer, batch, probabilities)) {
        predict_fail(n->ctx);
        return -1;
    }
    for (i = 0; i < count; i++) {
        item.pixels = (const float *)batch->images.data + (size_t)i * picture;
        item.probabilities = probabilities + (size_t)i * (size_t)n->num_classes;
        if (!item.file) item.label = ((const int32_t *)batch->labels.data)[i];
        predict_show(o, n, &item, score);
        item.record++;
    }
    return count;
}

/* ---- pictures -------------------------------------------------------------------------------- */
/* One picture of any size, as a data set of its own. */
static int predict_decoded(const predict_options *o, const predict_network *n, const char *path,
                           const mpt_image *image, float *probabilities) {
    mpt_loader_desc d = predict_loader_desc(o, n);
    mpt_tensor pixels, labels;
    mpt_loader *loader = NULL;
    mpt_batch batch;
    predict_item item;
    predict_score score;
    int32_t label = 0; /* unknown; a data set has to have some */
    int code = CLI_EXIT_FAILURE;

    memset(&pixels, 0, sizeof pixels);
    pixels.data = image->pixels;
    pixels.num_dims = 4;
    pixels.dims[0] = 1;
    pixels.dims[1] = image->height;
    pixels.dims[2] = image->width;
    pixels.dims[3] = image->channels;
    pixels.dtype = MPT_U8;
    memset(&labels, 0, sizeof labels);
    labels.data = &label;
    labels.num_dims = 1;
    labels.dims[0] = 1;
    labels.dtype = MPT_I32;
    d.array_images = &pixels;
    d.array_labels = &labels;
    d.num_workers = 1;
    memset(&item, 0, sizeof item);
    memset(&score, 0, sizeof score);
    item.file = path;
    item.label = -1;
    if (mpt_loader_create(n->ctx, &d, &loader) || mpt_loader_next(loader, &batch))
        cli_error("predict", code, "%s: %s", path, mpt_last_error(n->ctx)->message);
    else if (predict_batch(o, n, &batch, item, 1, probabilities, &score) == 1) code = 0;
    mpt_loader_destroy(loader);
    return code;
}

/* A bad picture is told and the others go on. */
static int predict_pictures(const predict_options *o, const predict_network *n,
                            const cli_list *paths, float *probabilities) {
    byte_buffer file = {NULL, 0, 0};
    int i, code = 0;

    for (i = 0; i < paths->count; i++) {
        const char *path = paths->items[i];
        mpt_image_desc desc;
        mpt_image image;
        mpt_bytes encoded;

        memset(&desc, 0, sizeof desc);
        desc.channels = n->channels;
        if (cli_refuse_dash("predict", path) || !predict_read_file(path, &file)) {
            code = CLI_EXIT_FAILURE;
            continue;
        }
        encoded.data = file.data;
        encoded.size = file.size;
        if (mpt_image_decode(n->ctx, encoded, &desc, &image)) {
            code = cli_error("predict", CLI_EXIT_FAILURE, "%s: %s", path,
                             mpt_last_error(n->ctx)->message);
        } else {
            if (predict_decoded(o, n, path, &image, probabilities)) code = CLI_EXIT_FAILURE;
            mpt_image_free(n->ctx, &image);
        }
    }
    byte_buffer_free(&file);
    return code;
}

/* ---- records --------------------------------------------------------------------------------- */
static void predict_tell_bad(const mpt_bad_record *bad, void *user) {
    *(int *)user = cli_error("predict", CLI_EXIT_FAILURE, "%s", bad->cause);
}

static int predict_records(const predict_options *o, const predict_network *n,
                           float *probabilities) {
    mpt_loader_desc d = predict_loader_desc(o, n);
    int64_t left = o->limit ? o->limit : INT64_MAX, done;
    mpt_loader *loader = NULL;
    predict_score score;
    predict_item item;
    mpt_batch batch;
    mpt_result rc;
    int code = 0, bad = 0;

    if (network_label_offset("predict", o->label_offset, &d) != CLI_RUN) return CLI_EXIT_USAGE;
    d.image_key = o->image_key;
    d.label_key = o->label_key;
    d.paths = o->data.items;
    d.num_paths = o->data.count;
    d.on_bad_record = MPT_BAD_RECORD_SKIP;
    d.bad_record = predict_tell_bad;
    d.bad_record_user = &bad;
    memset(&item, 0, sizeof item);
    memset(&score, 0, sizeof score);
    rc = mpt_loader_create(n->ctx, &d, &loader);
    while (rc == MPT_OK && left > 0 && (rc = mpt_loader_next(loader, &batch)) == MPT_OK) {
        done = predict_batch(o, n, &batch, item, left, probabilities, &score);
        if (done < 0) break;
        item.record += done;
        left -= done;
    }
    if (rc == MPT_OK && left > 0) code = CLI_EXIT_FAILURE; /* told by predict_batch */
    else if (rc < 0) code = predict_fail(n->ctx);
    else predict_show_score(o, &score);
    mpt_loader_destroy(loader);
    return code ? code : bad;
}

/* ---- the command line ------------------------------------------------------------------------ */
enum { PREDICT_NUM_OPTIONS = 21 };

static void predict_make_options(predict_options *o, cli_option *q) {
    static const char by_file[] = "as the file says";

    *q++ = cli_text("weights", 'w', &o->weights, "FILE", "weights, as train --export writes them");
    *q++ = cli_words("data", 0, &o->data, "PATTERN", "TFRecords instead of pictures");
    *q++ = cli_int("top", 0, &o->top, 1, PREDICT_MAX_TOP, "N", "classes that are told");
    *q++ = cli_default(cli_int("limit", 0, &o->limit, 1, INT64_MAX, "N", "records, no more"), "");
    *q++ = cli_flag("json", 0, &o->json, "one JSON object a line");
    *q++ = cli_flag("draw", 0, &o->draw, "draw each picture in the terminal");
    *q++ = cli_default(cli_choice("arch", 'a', &o->arch, NETWORK_NAMES, "network"), by_file);
    *q++ = cli_default(cli_int("image-size", 0, &o->image_size, 1, PREDICT_MAX_SIDE, "N",
                               "height and width of a picture"),
                       by_file);
    *q++ = cli_default(cli_int("channels", 0, &o->channels, 1, 3, "N", "1 gray, 3 colour"),
                       by_file);
    *q++ = cli_default(cli_int("num-classes", 0, &o->num_classes, 1, PREDICT_MAX_CLASSES, "N",
                               "classes"),
                       by_file);
    *q++ = cli_default(cli_text("classes", 0, &o->classes, "FILE", "names, one a line"), by_file);
    *q++ = cli_default(cli_text("mean", 0, &o->mean, "X,...", "of a channel, of pixels 0 .. 1"),
                       by_file);
    *q++ = cli_default(cli_text("std", 0, &o->std, "X,...", "of a channel"), by_file);
    *q++ = cli_text("image-key", 0, &o->image_key, "NAME", "feature with the picture");
    *q++ = cli_text("label-key", 0, &o->label_key, "NAME", "feature with the label");
    *q++ = cli_text("label-offset", 0, &o->label_offset, "auto|N", "number of the first class");
    *q++ = cli_choice("precision", 0, &o->precision, NETWORK_PRECISIONS, "what is stored");
    *q++ = cli_choice("device", 0, &o->device, NETWORK_DEVICES, "where it runs");
    *q++ = cli_int("batch-size", 'b', &o->batch_size, 1, 65536, "N", "records at a time");
    *q++ = cli_env(cli_default(cli_int("threads", 0, &o->threads, 1, 1024, "N", "that compute"),
                               "cores"),
                   "MPTRAIN_THREADS");
    *q++ = cli_default(cli_int("workers", 'j', &o->workers, 1, 1024, "N", "threads that decode"),
                       "cores");
}

static int predict_run(const predict_options *o, const cli_list *pictures) {
    mpt_ctx_desc desc;
    predict_network n;
    mpt_ctx *ctx = NULL;
    float *probabilities = NULL;
    int code;

    memset(&desc, 0, sizeof desc);
    desc.num_threads = (int)o->threads;
    code = network_make_ctx("predict", o->device, &desc, &ctx);
    if (code != CLI_RUN) return code;
    code = predict_network_open(ctx, o, &n);
    if (!code) {
        probabilities = (float *)calloc((size_t)n.batch_size * (size_t)n.num_classes,
                                        sizeof *probabilities);
        if (!probabilities) code = predict_no_memory();
    }
    if (!code)
        code = o->data.count > 0 ? predict_records(o, &n, probabilities)
                                 : predict_pictures(o, &n, pictures, probabilities);
    free(probabilities);
    predict_network_free(&n);
    mpt_ctx_destroy(ctx);
    return code;
}

int main(int argc, char **argv) {
    predict_options o;
    cli_option options[PREDICT_NUM_OPTIONS];
    cli_command command = {"predict",
                           "[IMAGE...]",
                           "What a trained network sees in pictures (JPEG, PNG, BMP), or in "
                           "TFRecords with --data.",
                           "predict " MPT_VERSION_STRING,
                           options,
                           PREDICT_NUM_OPTIONS,
                           0,
                           -1};
    cli_list pictures = {NULL, 0, 0};
    int code;

    memset(&o, 0, sizeof o);
    o.arch = -1;
    o.top = 5;
    o.batch_size = 64;
    o.device = network_default_device();
    o.label_offset = "auto";
    predict_make_options(&o, options);
    code = cli_parse(&command, argc, argv, &pictures);
    if (code == CLI_RUN) {
        if (!o.weights) code = cli_error("predict", CLI_EXIT_USAGE, "needs --weights FILE");
        else if (pictures.count > 0 && o.data.count > 0)
            code = cli_error("predict", CLI_EXIT_USAGE, "takes pictures or --data, not both");
        else if (pictures.count == 0 && o.data.count == 0)
            code = cli_error("predict", CLI_EXIT_USAGE, "needs pictures, or --data (see --help)");
        else code = network_check_device("predict", o.device);
        if (code == CLI_RUN) code = cli_finish("predict", predict_run(&o, &pictures));
    }
    cli_list_free(&pictures);
    cli_list_free(&o.data);
    return code;
}
