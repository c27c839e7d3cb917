/* train/export.h - weights for other programs, with what they have to know about the network: its
   name, the pictures that it takes, the names of its classes */
#ifndef TRAIN_EXPORT_H
#define TRAIN_EXPORT_H

#include "common/buffer.h"
#include "train/run.h"

enum { EXPORT_MAX_PAIRS = 8, EXPORT_MAX_TEXT = 1 << 20 };

/* Is it text that another program can show: not empty, UTF-8, without zeros? */
static bool export_is_text(const byte_buffer *b) {
    size_t i = 0;
    int n = 1;

    while (i < b->size && (n = cli_utf8_length(b->data + i, b->size - i)) > 0) i += (size_t)n;
    return b->size > 0 && n > 0 && !memchr(b->data, 0, b->size);
}

/* A text file without the ends of its last lines; NULL if there is none that is text. The caller
   frees. */
static char *export_read_text(const char *path) {
    char why[BYTE_BUFFER_MESSAGE];
    byte_buffer b = {NULL, 0, 0};

    if (!*path) return NULL;
    if (!byte_buffer_read(&b, path, EXPORT_MAX_TEXT, why) || !export_is_text(&b)) {
        byte_buffer_free(&b);
        return NULL;
    }
    while (b.size > 0 && b.data[b.size - 1] == '\n') b.data[--b.size] = 0;
    return (char *)b.data;
}

typedef struct export_pairs {
    mpt_metadata pairs[EXPORT_MAX_PAIRS];
    int count;
} export_pairs;

static void export_add(export_pairs *p, const char *key, const char *value) {
    if (!value) return;
    p->pairs[p->count].key = key;
    p->pairs[p->count++].value = value;
}

static int export_write(train_run *r) {
    const train_options *o = &r->o;
    bool described = options_ends_with(o->arch, ".txt");
    char size[24], channels[24], classes[24], *names, *description;
    export_pairs p;
    mpt_export_desc d;
    mpt_result rc;

    snprintf(size, sizeof size, "%lld", (long long)o->image_size);
    snprintf(channels, sizeof channels, "%lld", (long long)o->channels);
    snprintf(classes, sizeof classes, "%lld", (long long)o->num_classes);
    names = export_read_text(o->names_path);
    description = described ? export_read_text(o->arch) : NULL;
    memset(&p, 0, sizeof p);
    export_add(&p, "mptrain.arch", described ? NULL : o->arch);
    export_add(&p, "mptrain.description", description);
    export_add(&p, "mptrain.image_size", size);
    export_add(&p, "mptrain.channels", channels);
    export_add(&p, "mptrain.num_classes", classes);
    export_add(&p, "mptrain.mean", o->mean);
    export_add(&p, "mptrain.std", o->std);
    export_add(&p, "mptrain.classes", names);
    memset(&d, 0, sizeof d);
    d.path = o->export_path;
    d.metadata = p.pairs;
    d.num_metadata = p.count;
    rc = mpt_trainer_export(r->trainer, &d);
    free(names);
    free(description);
    if (rc) return log_fail_call(&r->log, r->ctx);
    log_note(&r->log, "weights written to %s", o->export_path);
    return CLI_RUN;
}

#endif /* TRAIN_EXPORT_H */
