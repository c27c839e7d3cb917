/* 01_count_records.c - reads a TFRecord file to its end and checks it on the way

   build:  cc -O2 -I. examples/01_count_records.c -o count -lm -lpthread
   run:    ./count FILE

   Shows: one context, one reader, one error exit. Each call says whether it worked; a damaged file
   ends in MPT_ERR_CORRUPT_DATA after all records before the damage, and the message tells where.
   Left out: compressed files (build with -DMPTRAIN_ZLIB and -lz, nothing else changes). */
#define MPTRAIN_IMPLEMENTATION
#include "mptrain.h"
#include <stdio.h>

int main(int argc, char **argv) {
    mpt_ctx *ctx = NULL;
    mpt_tfrecord *file = NULL;
    mpt_tfrecord_desc desc = {0};
    mpt_bytes record;
    mpt_result rc;
    long count = 0;

    if (argc != 2) {
        fprintf(stderr, "usage: %s FILE\n", argv[0]);
        return 2;
    }
    if (mpt_ctx_create(NULL, &ctx)) return 1;
    desc.path = argv[1];
    rc = mpt_tfrecord_open(ctx, &desc, &file);
    while (rc == MPT_OK && (rc = mpt_tfrecord_next(file, &record)) == MPT_OK) count++;
    printf("%ld records\n", count);
    if (rc != MPT_END) fprintf(stderr, "%s\n", mpt_last_error(ctx)->message);
    mpt_tfrecord_close(file);
    mpt_ctx_destroy(ctx);
    return rc != MPT_END;
}
