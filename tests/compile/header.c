/* The header as most files of a program see it; twice, since headers include each other. */
#include "mptrain.h"
#include "mptrain.h"

extern const mpt_error *header_alone(const mpt_ctx *ctx);
const mpt_error *header_alone(const mpt_ctx *ctx) {
    return mpt_last_error(ctx);
}
