/* double_net.h - a model's forward and backward pass once more, in double precision, one plain loop
   a layer: what the trainer's FP32 and 16-bit gradients are compared with

       double_net net = double_net_open(trainer);     takes the trainer's weights
       double_net_forward(&net, &batch, NULL);        net.loss: mean over the records
       double_net_backward(&net);                     net.grads: (num_params)
       double_net_close(&net);

   A ReLU whose input is nearly 0 is open or shut by chance of rounding, and all behind it depends
   on that; a max pool chooses between near equals likewise. double_net_forward(&net, &batch,
   trainer) chooses as the trainer did in its last forward pass, counts where that differs from its
   own choice, and keeps the largest distance from a tie among these. */
#ifndef DOUBLE_NET_H
#define DOUBLE_NET_H

#include "training.h"

typedef struct double_net {
    const mpt_trainer *trainer;
    const mpt_model *m;
    int n, classes;
    const int32_t *labels;
    double *params, *grads;     /* (num_params) */
    double **value, **gradient; /* [num_nodes], each (n,h,w,c) */
    double **mask;       /* [num_nodes]: ReLU: 0 or 1; dropout: factors; max pool: which won */
    double *mean, *var;  /* (num_stats): of a batch norm at stat_offset; var biased */
    double loss;         /* mean, with label smoothing */
    int num_flips;       /* choices that the trainer's rounding made otherwise */
    double largest_flip; /* the largest distance from a tie of one */
} double_net;

static inline size_t double_net_elements(const double_net *net, int v) {
    return (size_t)net->n * (size_t)mpti_node_elements(&net->m->nodes[v]);
}

static inline double *double_net_row(size_t count) {
    return (double *)calloc(count + 1, sizeof(double));
}

static inline void double_net_take_weights(double_net *net) {
    int64_t i;
    for (i = 0; i < net->m->num_params; i++) net->params[i] = net->trainer->masters[i];
}

static inline double_net double_net_open(const mpt_trainer *t) {
    double_net net;
    int v;
    memset(&net, 0, sizeof net);
    net.trainer = t;
    net.m = t->model;
    net.n = t->net.capacity;
    net.classes = net.m->nodes[net.m->logits].c;
    net.params = double_net_row((size_t)net.m->num_params);
    net.grads = double_net_row((size_t)net.m->num_params);
    net.mean = double_net_row((size_t)net.m->num_stats);
    net.var = double_net_row((size_t)net.m->num_stats);
    net.value = (double **)calloc((size_t)net.m->num_nodes * 3, sizeof(double *));
    net.gradient = net.value + net.m->num_nodes;
    net.mask = net.gradient + net.m->num_nodes;
    for (v = 0; v < net.m->num_nodes * 3; v++)
        net.value[v] = double_net_row(double_net_elements(&net, v % net.m->num_nodes));
    double_net_take_weights(&net);
    return net;
}

static inline void double_net_close(double_net *net) {
    int v;
    for (v = 0; v < net->m->num_nodes * 3; v++) free(net->value[v]);
    free(net->value);
    free(net->params);
    free(net->grads);
    free(net->mean);
    free(net->var);
}

/* ---- convolution and dense ----------------------------------------------------------------------
   Calls row(x, w, y, c) for each tap: c numbers of x, y one number. */
typedef void (*double_row_fn)(double *x, double *w, double *y, int c);

static inline void double_row_forward(double *x, double *w, double *y, int c) {
    double even = 0, odd = 0;
    int i;
    for (i = 0; i + 1 < c; i += 2) {
        even += x[i] * w[i];
        odd += x[i + 1] * w[i + 1];
    }
    *y += even + odd + (i < c ? x[i] * w[i] : 0);
}

static inline void double_row_dgrad(double *dx, double *w, double *dy, int c) {
    const double g = *dy;
    int i;
    for (i = 0; g != 0 && i < c; i++) dx[i] += w[i] * g;
}

static inline void double_row_wgrad(double *x, double *dw, double *dy, int c) {
    const double g = *dy;
    int i;
    for (i = 0; g != 0 && i < c; i++) dw[i] += x[i] * g;
}

static inline void double_conv(const double_net *net, int v, double *x, double *w, double *y,
                               double_row_fn row) {
    const mpti_node *o = &net->m->nodes[v], *in = &net->m->nodes[o->in[0]];
    const int kernel = o->kernel;
    int n, p, q, k, r, first, last;
    for (n = 0; n < net->n; n++)
        for (p = 0; p < o->h; p++)
            for (q = 0; q < o->w; q++) {
                const int left = q * o->stride - o->padding;
                first = left < 0 ? -left : 0; /* the taps of a row that fall on the picture */
                last = left + kernel > in->w ? in->w - left : kernel;
                for (k = 0; k < o->c; k++)
                    for (r = 0; r < kernel; r++) {
                        const int h = p * o->stride - o->padding + r;
                        if (h < 0 || h >= in->h || last <= first) continue;
                        row(x + (((size_t)n * in->h + h) * in->w + left + first) * in->c,
                            w + (((size_t)k * kernel + r) * kernel + first) * in->c,
                            y + (((size_t)n * o->h + p) * o->w + q) * o->c + k,
                            (last - first) * in->c);
                    }
            }
}

static inline void double_dense(const double_net *net, int v, double *x, double *w, double *y,
                                double_row_fn row) {
    const mpti_node *o = &net->m->nodes[v];
    const int in = (int)mpti_node_elements(&net->m->nodes[o->in[0]]);
    int n, k;
    for (n = 0; n < net->n; n++)
        for (k = 0; k < o->c; k++)
            row(x + (size_t)n * in, w + (size_t)k * in, y + (size_t)n * o->c + k, in);
}

static inline void double_bias(const double_net *net, int v) {
    const mpti_node *o = &net->m->nodes[v];
    const double *bias = net->params + o->param_offset + mpti_node_weights(o);
    size_t i, count = double_net_elements(net, v);
    for (i = 0; i < count && o->use_bias; i++) net->value[v][i] += bias[i % o->c];
}

static inline void double_dbias(const double_net *net, int v) {
    const mpti_node *o = &net->m->nodes[v];
    double *bias = net->grads + o->param_offset + mpti_node_weights(o);
    size_t i, count = double_net_elements(net, v);
    for (i = 0; i < count && o->use_bias; i++) bias[i % o->c] += net->gradient[v][i];
}

/* ---- batch norm, in the two-pass form -------------------------------------------------------- */
static inline void double_batchnorm(const double_net *net, int v) {
    const mpti_node *o = &net->m->nodes[v];
    const double *x = net->value[o->in[0]], *gamma = net->params + o->param_offset;
    size_t i, count = double_net_elements(net, v), m = count / o->c;
    int c;
    for (c = 0; c < o->c; c++) {
        double mean = 0, var = 0, inv_std;
        for (i = c; i < count; i += o->c) mean += x[i] / (double)m;
        for (i = c; i < count; i += o->c) var += (x[i] - mean) * (x[i] - mean) / (double)m;
        inv_std = 1 / sqrt(var + o->epsilon);
        for (i = c; i < count; i += o->c)
            net->value[v][i] = (x[i] - mean) * inv_std * gamma[c] + gamma[o->c + c];
        net->mean[o->stat_offset + c] = mean;
        net->var[o->stat_offset + c] = var;
    }
}

static inline void double_batchnorm_backward(const double_net *net, int v) {
    const mpti_node *o = &net->m->nodes[v];
    const double *x = net->value[o->in[0]], *dy = net->gradient[v];
    const double *gamma = net->params + o->param_offset;
    double *dx = net->gradient[o->in[0]], *dgamma = net->grads + o->param_offset;
    size_t i, count = double_net_elements(net, v), m = count / o->c;
    int c;
    for (c = 0; c < o->c; c++) {
        const double mean = net->mean[o->stat_offset + c];
        const double inv_std = 1 / sqrt(net->var[o->stat_offset + c] + o->epsilon);
        double sum = 0, product = 0;
        for (i = c; i < count; i += o->c) {
            sum += dy[i];
            product += dy[i] * (x[i] - mean) * inv_std;
        }
        dgamma[c] += product;
        dgamma[o->c + c] += sum;
        for (i = c; i < count; i += o->c)
            dx[i] += gamma[c] * inv_std *
                     (dy[i] - sum / (double)m - (x[i] - mean) * inv_std * product / (double)m);
    }
}

/* ---- pools ----------------------------------------------------------------------------------- */
typedef struct double_window {
    int h, w; /* of its corner on the input; negative: padding */
    int rows, cols;
    double *x, *dx;
    size_t at, begin; /* of the output; of the record and channel on the input */
} double_window;

/* Where element (i,j) lies on the input; SIZE_MAX: on the padding. */
static inline size_t double_window_at(const mpti_node *in, const double_window *win, int i, int j) {
    const int h = win->h + i, w = win->w + j;
    if (h < 0 || h >= in->h || w < 0 || w >= in->w) return SIZE_MAX;
    return win->begin + ((size_t)h * in->w + w) * in->c;
}

/* The first of the largest, as i * cols + j; or the one that the trainer took. */
static inline int double_winner(double_net *net, const mpti_node *in, const double_window *win,
                                const uint8_t *argmax) {
    double most = 0;
    int i, j, own = -1;
    for (i = 0; i < win->rows; i++)
        for (j = 0; j < win->cols; j++) {
            const size_t from = double_window_at(in, win, i, j);
            if (from == SIZE_MAX || (own >= 0 && !(win->x[from] > most))) continue;
            own = i * win->cols + j;
            most = win->x[from];
        }
    if (!argmax || argmax[win->at] == own) return own;
    i = argmax[win->at] / win->cols;
    j = argmax[win->at] % win->cols;
    net->num_flips++;
    net->largest_flip = fmax(net->largest_flip, most - win->x[double_window_at(in, win, i, j)]);
    return argmax[win->at];
}

static inline void double_max_pool(const mpti_node *in, const double_window *win, double *y,
                                   const double *dy, double winner) {
    const size_t from = double_window_at(in, win, (int)winner / win->cols, (int)winner % win->cols);
    if (dy) win->dx[from] += *dy;
    else *y = win->x[from];
}

static inline void double_avg_pool(const mpti_node *in, const double_window *win, double *y,
                                   const double *dy) {
    const double area = (double)win->rows * win->cols;
    int i, j;
    for (i = 0; i < win->rows; i++)
        for (j = 0; j < win->cols; j++) {
            const size_t from = double_window_at(in, win, i, j);
            if (from == SIZE_MAX) continue;
            if (dy) win->dx[from] += *dy / area;
            else *y += win->x[from] / area;
        }
}

/* Goes over the windows. Forward of a max pool sets mask, backward reads it. */
static inline void double_pool(double_net *net, int v, int backward, const mpt_trainer *gates) {
    const mpti_node *o = &net->m->nodes[v], *in = &net->m->nodes[o->in[0]];
    const int global = o->kind == MPTI_KIND_GLOBAL_AVG_POOL, max = o->kind == MPTI_KIND_MAX_POOL;
    const uint8_t *argmax = gates && max
                                ? gates->net.activations + gates->net.layout.places[v].argmax
                                : NULL;
    const size_t count = double_net_elements(net, v);
    double_window win;
    win.rows = global ? in->h : o->kernel;
    win.cols = global ? in->w : o->kernel;
    win.x = net->value[o->in[0]];
    win.dx = net->gradient[o->in[0]];
    for (win.at = 0; win.at < count; win.at++) {
        const size_t pixel = win.at / o->c, picture = pixel / ((size_t)o->h * o->w);
        double *y = net->value[v] + win.at, *dy = backward ? net->gradient[v] + win.at : NULL;
        win.h = (int)(pixel / o->w % o->h) * o->stride - o->padding;
        win.w = (int)(pixel % o->w) * o->stride - o->padding;
        win.begin = picture * (size_t)mpti_node_elements(in) + win.at % o->c;
        if (max && !backward) net->mask[v][win.at] = double_winner(net, in, &win, argmax);
        if (max) double_max_pool(in, &win, y, dy, net->mask[v][win.at]);
        else double_avg_pool(in, &win, y, dy);
    }
}

/* ---- masks ----------------------------------------------------------------------------------- */
static inline void double_gates(double_net *net, int v, const mpt_trainer *gates) {
    const double *x = net->value[net->m->nodes[v].in[0]];
    const void *y = gates ? mpti_net_value(&gates->net, v) : NULL;
    size_t i, count = double_net_elements(net, v);
    for (i = 0; i < count; i++) {
        int open = x[i] > 0, other = y ? mpti_load(gates->net.dtype, y, i) > 0 : open;
        if (open != other) {
            net->num_flips++;
            net->largest_flip = fmax(net->largest_flip, fabs(x[i]));
        }
        net->mask[v][i] = other;
    }
}

/* The trainer's own mask: what its operator makes of ones. */
static inline void double_dropout_mask(double_net *net, int v, const mpt_batch *b) {
    const mpti_node *o = &net->m->nodes[v];
    size_t i, count = double_net_elements(net, v);
    float *ones = (float *)malloc(count * sizeof *ones);
    mpt_dropout_args a;
    memset(&a, 0, sizeof a);
    for (i = 0; i < count; i++) ones[i] = 1;
    a.x = a.y = ones;
    a.sample_ids = b->sample_ids;
    a.seed = net->trainer->desc.seed;
    a.epoch = net->trainer->step;
    a.layer = o->number;
    a.probability = o->probability;
    a.n = a.num_valid = net->n;
    a.per_sample = mpti_node_elements(o);
    CHECK_OK(NULL, net->trainer->net.backend->dropout_forward(net->trainer->net.self, &a));
    for (i = 0; i < count; i++) net->mask[v][i] = ones[i];
    free(ones);
}

/* ---- the passes ------------------------------------------------------------------------------ */
static inline void double_net_layer(double_net *net, int v, const mpt_trainer *gates) {
    const mpti_node *o = &net->m->nodes[v];
    double *x = net->value[o->in[0]], *y = net->value[v], *w = net->params + o->param_offset;
    size_t i, count = double_net_elements(net, v);
    memset(y, 0, count * sizeof *y);
    switch (o->kind) {
    case MPTI_KIND_CONV2D: double_conv(net, v, x, w, y, double_row_forward); break;
    case MPTI_KIND_DENSE: double_dense(net, v, x, w, y, double_row_forward); break;
    case MPTI_KIND_BATCHNORM: double_batchnorm(net, v); break;
    case MPTI_KIND_ADD:
        for (i = 0; i < count; i++) y[i] = x[i] + net->value[o->in[1]][i];
        break;
    case MPTI_KIND_RELU:
    case MPTI_KIND_DROPOUT:
        for (i = 0; i < count; i++) y[i] = net->mask[v][i] != 0 ? x[i] * net->mask[v][i] : 0;
        break;
    default: double_pool(net, v, 0, gates); break;
    }
    double_bias(net, v);
}

/* Loss, and its gradient at the logits. */
static inline void double_net_loss(double_net *net) {
    const double smoothing = net->trainer->desc.label_smoothing;
    const int logits = net->m->logits, k = net->classes;
    int n, c;
    net->loss = 0;
    for (n = 0; n < net->n; n++) {
        const double *x = net->value[logits] + (size_t)n * k;
        double *dx = net->gradient[logits] + (size_t)n * k, most = x[0], sum = 0;
        for (c = 1; c < k; c++) most = fmax(most, x[c]);
        for (c = 0; c < k; c++) sum += exp(x[c] - most);
        for (c = 0; c < k; c++) {
            const double target = smoothing / k + (c == net->labels[n] ? 1 - smoothing : 0);
            net->loss -= target * (x[c] - most - log(sum)) / net->n;
            dx[c] = (exp(x[c] - most) / sum - target) / net->n;
        }
    }
}

/* All n records of the batch, FP32 pictures. gates: NULL, or the trainer that has just gone forward
   with the same batch. */
static inline void double_net_forward(double_net *net, const mpt_batch *b,
                                      const mpt_trainer *gates) {
    const float *x = (const float *)b->images.data;
    size_t i, count = double_net_elements(net, MPT_INPUT);
    int v;
    CHECK_EQ_INT(b->images.dims[0], net->n);
    net->labels = (const int32_t *)b->labels.data;
    net->num_flips = 0;
    net->largest_flip = 0;
    for (i = 0; i < count; i++) net->value[MPT_INPUT][i] = x[i];
    for (v = 1; v < net->m->num_nodes; v++) {
        if (net->m->nodes[v].kind == MPTI_KIND_RELU) double_gates(net, v, gates);
        if (net->m->nodes[v].kind == MPTI_KIND_DROPOUT) double_dropout_mask(net, v, b);
        double_net_layer(net, v, gates);
    }
    double_net_loss(net);
}

static inline void double_net_layer_backward(double_net *net, int v) {
    const mpti_node *o = &net->m->nodes[v];
    double *x = net->value[o->in[0]], *dx = net->gradient[o->in[0]], *dy = net->gradient[v];
    double *w = net->params + o->param_offset, *dw = net->grads + o->param_offset;
    size_t i, count = double_net_elements(net, v);
    switch (o->kind) {
    case MPTI_KIND_CONV2D:
        double_conv(net, v, x, dw, dy, double_row_wgrad);
        if (o->in[0] != MPT_INPUT) double_conv(net, v, dx, w, dy, double_row_dgrad);
        break;
    case MPTI_KIND_DENSE:
        double_dense(net, v, x, dw, dy, double_row_wgrad);
        double_dense(net, v, dx, w, dy, double_row_dgrad);
        break;
    case MPTI_KIND_BATCHNORM: double_batchnorm_backward(net, v); break;
    case MPTI_KIND_ADD:
        for (i = 0; i < count; i++) {
            dx[i] += dy[i];
            net->gradient[o->in[1]][i] += dy[i];
        }
        break;
    case MPTI_KIND_RELU:
    case MPTI_KIND_DROPOUT:
        for (i = 0; i < count; i++) dx[i] += dy[i] * net->mask[v][i];
        break;
    default: double_pool(net, v, 1, NULL); break;
    }
    double_dbias(net, v);
}

/* After double_net_forward. */
static inline void double_net_backward(double_net *net) {
    int v;
    memset(net->grads, 0, (size_t)net->m->num_params * sizeof *net->grads);
    for (v = 0; v < net->m->num_nodes; v++)
        if (v != net->m->logits)
            memset(net->gradient[v], 0, double_net_elements(net, v) * sizeof(double));
    for (v = net->m->num_nodes - 1; v > 0; v--) double_net_layer_backward(net, v);
}

#endif /* DOUBLE_NET_H */
