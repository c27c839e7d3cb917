/* 03_batches.c - goes over a data set of pictures in shuffled, augmented batches

   build:  cc -O2 -I. examples/03_batches.c -o batches -lm -lpthread
   run:    ./batches NUM_CLASSES SIZE FILE...       (names, globs, folders, name@N)

   Shows: the loader with ImageNet's augmentation and normalisation, what a batch holds, how an
   epoch ends, and how skipped records are told. Run it twice, or with other numbers of cores: the
   lines are the same. */
#define MPTRAIN_IMPLEMENTATION
#include "mptrain.h"
#include <stdio.h>
#include <stdlib.h>

static void tell(const mpt_bad_record *bad, void *user) {
    (void)user;
    fprintf(stderr, "left out: %s\n", bad->cause);
}

/* One number that stands for a batch: equal batches give equal numbers. */
static unsigned checksum(const mpt_batch *batch) {
    const int64_t *d = batch->images.dims;
    size_t count = (size_t)(d[0] * d[1] * d[2] * d[3]);
    return mpt_crc32c(0, batch->images.data, count * mpt_dtype_size(batch->images.dtype));
}

int main(int argc, char **argv) {
    static const float mean[3] = {0.485f, 0.456f, 0.406f}, std[3] = {0.229f, 0.224f, 0.225f};
    mpt_ctx *ctx = NULL;
    mpt_loader *data = NULL;
    mpt_loader_desc desc = {0};
    mpt_batch batch;
    mpt_result rc;
    int c;

    if (argc < 4) {
        fprintf(stderr, "usage: %s NUM_CLASSES SIZE FILE...\n", argv[0]);
        return 2;
    }
    if (mpt_ctx_create(NULL, &ctx)) return 1;
    desc.num_classes = atoi(argv[1]);
    desc.height = desc.width = atoi(argv[2]);
    desc.channels = 3;
    desc.paths = (const char *const *)argv + 3;
    desc.num_paths = argc - 3;
    desc.augment = MPT_AUGMENT_IMAGENET;
    for (c = 0; c < 3; c++) {
        desc.mean[c] = mean[c];
        desc.std[c] = std[c];
    }
    desc.on_bad_record = MPT_BAD_RECORD_SKIP;
    desc.bad_record = tell;
    rc = mpt_loader_create(ctx, &desc, &data);
    while (rc == MPT_OK && (rc = mpt_loader_next(data, &batch)) == MPT_OK)
        printf("batch %d: %d pictures, first label %d, checksum %08x\n", (int)batch.index,
               (int)batch.num_valid, (int)((const int32_t *)batch.labels.data)[0],
               checksum(&batch));
    if (rc != MPT_END) fprintf(stderr, "%s\n", mpt_last_error(ctx)->message);
    mpt_loader_destroy(data);
    mpt_ctx_destroy(ctx);
    return rc != MPT_END;
}
