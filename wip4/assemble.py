# assemble.py: puts the drafts of this folder into a copy of mptrain.h, build/next/mptrain.h (mkdir build/next first)
import re,os
M='./'; W=M+'wip4/'
h=open(M+'mptrain.h').read()
rd=lambda n: open(W+n).read()
bar='='*97
def strip(s): return s.strip('\n')+'\n'
api_train_head='/* %s\n * >>api-train   Training: optimizer, loss scaling, the trainer, its state\n * %s\n */\n\n'%(bar,bar)
api='\n'.join([strip(rd('api_model.inc')), api_train_head+strip(rd('api_train_part.inc'))+'\n'+strip(rd('api_trainer.inc')), strip(rd('api_backend.inc'))])
mark='#ifdef __cplusplus\n}\n#endif\n#endif /* MPTRAIN_H'
assert mark in h
h=h.replace(mark,api+'\n'+mark,1)
# base patches
h=h.replace('typedef enum mpti_purpose { MPTI_RANDOM_FILES = 1, MPTI_RANDOM_SHUFFLE, MPTI_RANDOM_AUGMENT } mpti_purpose;','XX')
h=re.sub(r'typedef enum mpti_purpose \{[^}]*\} mpti_purpose;','typedef enum mpti_purpose {\n    MPTI_RANDOM_FILES = 1,\n    MPTI_RANDOM_SHUFFLE,\n    MPTI_RANDOM_AUGMENT,\n    MPTI_RANDOM_INIT\n} mpti_purpose;',h) if 'XX' not in h else h.replace('XX','typedef enum mpti_purpose {\n    MPTI_RANDOM_FILES = 1,\n    MPTI_RANDOM_SHUFFLE,\n    MPTI_RANDOM_AUGMENT,\n    MPTI_RANDOM_INIT\n} mpti_purpose;')
h=h.replace('    mpti_pool *pool; /* started by the first mpt_parallel_for */\n','    mpti_pool *pool; /* started by the first mpt_parallel_for */\n    const mpt_backend *backend;\n    void *backend_self;\n')
h=h.replace('''    ctx->desc = d;
    *out = ctx;
    return MPT_OK;''','''    ctx->desc = d;
    ctx->backend = mpt_backend_cpu();
    rc = ctx->backend->open(ctx, 0, &ctx->backend_self);
    if (rc) {
        mpt_ctx_destroy(ctx);
        return rc;
    }
    *out = ctx;
    return MPT_OK;''')
h=h.replace('''    mpt_ctx_desc d;
    mpt_ctx *ctx;

    if (!out) return MPT_ERR_INVALID_ARGUMENT;''','''    mpt_ctx_desc d;
    mpt_ctx *ctx;
    mpt_result rc;

    if (!out) return MPT_ERR_INVALID_ARGUMENT;''')
h=h.replace('''    allocator = ctx->desc.allocator;
    mpti_pool_destroy(ctx->pool);''','''    allocator = ctx->desc.allocator;
    if (ctx->backend_self) ctx->backend->close(ctx->backend_self);
    mpti_pool_destroy(ctx->pool);''')
h=h.replace('/* ---- time -----','''/* ---- time -----''')
h=h.replace('static void mpti_sleep_ms(int ms) {','''static double mpti_seconds(void) { /* of a clock that never goes back */
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static void mpti_sleep_ms(int ms) {''')
opt=rd('optim.inc')
extra='''
static double mpti_cos_turn(double turn) { /* cos(2 pi turn), turn in 0 .. 1 */
    return 2 * mpti_half_cosine(turn <= 0.5 ? 2 * turn : 2 - 2 * turn) - 1;
}

static bool mpti_half_is_fast(void) { return mpti_has_avx2(); } /* the family that converts by F16C */
'''
tr=rd('trainer.inc')
i=tr.index('/* ---- descs ---')
tr=tr[:i]+extra.strip('\n')+'\n\n'+tr[i:]
tr=tr.replace('/* ---- the step ---','''static mpti_params mpti_trainer_params(mpt_trainer *t, const float *row) {
    mpti_params p;

    p.weights = t->masters;
    p.gradients = row;
    p.first = t->first;
    p.second = t->second;
    p.half = t->half;
    p.half_dtype = t->net.dtype;
    return p;
}

/* ---- the step ---''')
chapters=[rd('cpu.inc'),rd('model.inc'),rd('train.inc'),opt,rd('scaler.inc'),rd('state.inc'),tr+rd('trainer_state.inc')]
end='\n#ifdef __cplusplus\n}\n#endif\n#endif /* MPTRAIN_IMPLEMENTATION */'
assert end in h
h=h.replace(end,'\n'+'\n'.join(strip(c) for c in chapters)+end,1)
open('build/next/mptrain.h','w').write(h)
