/* Two files of one program, each with a private copy of the library: compiled once as it is and
   once with -DSECOND. */
#define MPTRAIN_IMPLEMENTATION
#define MPTRAIN_STATIC
#include "mptrain.h"

static int create_and_destroy(void) {
    mpt_ctx *ctx = NULL;
    mpt_result rc = mpt_ctx_create(NULL, &ctx);
    mpt_ctx_destroy(ctx);
    return rc != MPT_OK;
}

extern int second_copy(void);

#ifdef SECOND
int second_copy(void) {
    return create_and_destroy();
}
#else
int main(void) {
    return create_and_destroy() || second_copy();
}
#endif
