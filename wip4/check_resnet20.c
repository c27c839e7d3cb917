#define MPTRAIN_IMPLEMENTATION
#include "mptrain.h"
#include <stdio.h>
#define R "reference/"
#define OK(c) do { mpt_result rc_ = (c); if (rc_) { printf("%s: %s\n", #c, mpt_last_error(ctx)->message); return 1; } } while (0)
int main(int argc, char **argv) {
    mpt_ctx *ctx; mpt_model *m; mpt_trainer *t; mpt_trainer_desc d; mpt_batch b; mpt_step_report r; mpt_safetensors *s; mpt_safetensors_desc sd; mpt_safetensors_info info;
    static float xin[8*3*32*32*4], x[8*32*32*3]; static int64_t lab[64]; static int32_t labels[64]; int64_t i; int64_t k; int step; char hex[65];
    double want[5] = {2.3451362804574125, 1.6117906070352526, 1.0860671349325384, 0.6536592559929327, 0.2960599665728882};
    OK(mpt_ctx_create(NULL, &ctx));
    OK(mpt_model_create(ctx, 32, 32, 3, &m));
    OK(mpt_model_finish(m, mpt_zoo(m, "resnet20", 10)));
    memset(&d, 0, sizeof d); d.precision = argc > 1 ? (mpt_precision)atoi(argv[1]) : MPT_PRECISION_FP32; d.optimizer.learning_rate = 0.05f; d.optimizer.weight_decay = 5e-4f;
    memset(&sd, 0, sizeof sd); sd.path = R "resnet20.reference.safetensors";
    OK(mpt_safetensors_open(ctx, &sd, &s));
    for (k = 0; k < mpt_safetensors_count(s); k++) { OK(mpt_safetensors_get(s, k, &info)); if (!strncmp(info.name, "after.", 6) || !strncmp(info.name,"grad",4)) continue; printf("%s %s [%lld,%lld,%lld,%lld]\n", info.name, info.dtype_name, (long long)info.dims[0], (long long)info.dims[1], (long long)info.dims[2], (long long)info.dims[3]); }
    k = mpt_safetensors_find(s, "labels"); OK(mpt_safetensors_get(s,k,&info)); OK(mpt_safetensors_read(s, k, lab, (size_t)info.bytes)); int n = (int)info.count;
    k = mpt_safetensors_find(s, "x"); if (k < 0) k = mpt_safetensors_find(s, "images"); if (k<0) k = mpt_safetensors_find(s, "input"); OK(mpt_safetensors_get(s,k,&info)); OK(mpt_safetensors_read(s, k, xin, (size_t)info.bytes));
    for (i = 0; i < n; i++) labels[i] = (int32_t)lab[i];
    for (i = 0; i < n; i++) for (int c = 0; c < 3; c++) for (int p = 0; p < 1024; p++) x[(i*1024+p)*3+c] = xin[(i*3+c)*1024+p];
    OK(mpt_trainer_create(m, &d, n, &t));
    OK(mpt_trainer_import(t, NULL, R "resnet20.weights.safetensors"));
    memset(&b, 0, sizeof b); b.images.data = x; b.images.dtype = MPT_F32; b.images.num_dims = 4; b.images.dims[0]=n; b.images.dims[1]=b.images.dims[2]=32; b.images.dims[3]=3; b.labels.data=labels; b.labels.dtype=MPT_I32; b.labels.num_dims=1; b.labels.dims[0]=n;
    OK(mpt_trainer_accumulate(t, &b));
    { int v, part; float *keep = t->masters; static float g[400000], w[400000]; 
      while (t->depth > 1) OK(mpti_trainer_merge(t));
      for (v = 1; v < m->num_nodes; v++) for (part = 0; part < 2; part++) { mpti_torch tt; char nm[128]; double mx = 0, er = 0; 
        if (!mpti_torch_tensor(t, v, (mpti_torch_part)part, &tt)) continue; tt.data = t->rows[0] + (tt.data - keep);
        snprintf(nm, sizeof nm, "grad.%s", tt.name); k = mpt_safetensors_find(s, nm); if (k < 0) { printf("no %s\n", nm); continue; }
        OK(mpt_safetensors_get(s,k,&info)); OK(mpt_safetensors_read(s,k,w,(size_t)info.bytes)); mpti_torch_permute(&tt, g, true);
        for (i = 0; i < tt.count; i++) { double e = fabs((double)g[i] - w[i]); if (e > er) er = e; if (fabs(w[i]) > mx) mx = fabs(w[i]); }
        if (er > 1e-5*mx) printf("%s rel err %.2e of max %.3g\n", nm, er/mx, mx); } }
    mpti_trainer_begin_step(t);
    for (step = 0; step < 5; step++) { OK(mpt_trainer_step(t, &b, &r)); printf("step %d loss %.7f want %.7f diff %.2e norm %g scale %g skipped %d lr %g\n", step, r.loss, want[step], r.loss-want[step], r.grad_norm, r.loss_scale, r.skipped, r.learning_rate); }
    OK(mpt_trainer_sha256(t, hex)); printf("%s\n", hex);
    mpt_safetensors_close(s); mpt_trainer_destroy(t); mpt_model_destroy(m); mpt_ctx_destroy(ctx); return 0; }
