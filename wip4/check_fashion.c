#define MPTRAIN_IMPLEMENTATION
#include "mptrain.h"
#define OK(c) do { mpt_result rc_ = (c); if (rc_) { printf("%s: %s\n", #c, mpt_last_error(ctx)->message); return 1; } } while (0)
int main(int argc, char **argv) {
    mpt_ctx *ctx; mpt_model *m; mpt_trainer *t; mpt_trainer_desc d; mpt_batch b; mpt_step_report r; mpt_loader_desc l; mpt_loader *tr, *te; mpt_result rc; mpt_metrics me; mpt_memory_plan plan; int e; 
    const char *p1 = "output/data/train-*-of-*", *p2 = "output/data/test-*-of-*"; double t0;
    OK(mpt_ctx_create(NULL, &ctx)); OK(mpt_model_create(ctx, 28, 28, 1, &m)); OK(mpt_model_finish(m, mpt_zoo(m, argc>2?argv[2]:"lenet", 10)));
    memset(&d, 0, sizeof d); d.precision = argc > 1 ? (mpt_precision)atoi(argv[1]) : MPT_PRECISION_FP16; d.optimizer.learning_rate = 0.05f; d.schedule.kind = MPT_SCHEDULE_COSINE; d.total_steps = 469*3; d.schedule.warmup_steps = 100;
    memset(&l, 0, sizeof l); l.paths = &p1; l.num_paths = 1; l.height = l.width = 28; l.channels = 1; l.num_classes = 10; l.batch_size = 128; l.mean[0] = 0.286f; l.std[0] = 0.353f; l.augment = MPT_AUGMENT_FLIP; l.shuffle_buffer=8192;
    OK(mpt_loader_create(ctx, &l, &tr)); l.paths = &p2; l.no_shuffle = 1; l.augment = MPT_AUGMENT_NONE; OK(mpt_loader_create(ctx, &l, &te));
    OK(mpt_model_plan(m, &d, 128, &plan)); printf("plan %zu act %zu work %zu grads %zu\n", plan.total, plan.activations, plan.workspace, plan.gradients);
    OK(mpt_trainer_create(m, &d, 128, &t)); t0 = mpti_seconds();
    for (e = 0; e < 3; e++) { double loss = 0, w = 0, ts; int n = 0; 
      for (;;) { ts = mpti_seconds(); rc = mpt_loader_next(tr, &b); w += mpti_seconds() - ts; if (rc) break; OK(mpt_trainer_step(t, &b, &r)); loss += r.loss; n++; }
      if (rc != MPT_END) { printf("%s\n", mpt_last_error(ctx)->message); return 1; }
      OK(mpt_evaluate(t, te, &me)); printf("epoch %d loss %.4f test acc %.4f loss %.4f scale %g wait %.2f time %.1f\n", e, loss / n, (double)me.num_correct / me.num_samples, me.loss, r.loss_scale, w, mpti_seconds() - t0); fflush(stdout); }
    mpt_trainer_destroy(t); mpt_model_destroy(m); mpt_loader_destroy(tr); mpt_loader_destroy(te); mpt_ctx_destroy(ctx); return 0; }
