/* A program whose implementation lies in another file. */
#include <stdio.h>

#include "mptrain.h"

int main(void) {
    mpt_ctx *ctx = NULL;
    mpt_result rc = mpt_ctx_create(NULL, &ctx);
    if (rc != MPT_OK) fprintf(stderr, "mpt_ctx_create: %s\n", mpt_result_string(rc));
    mpt_ctx_destroy(ctx);
    return rc != MPT_OK;
}
