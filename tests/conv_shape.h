/* conv_shape.h - the shape of a convolution, as tests list them, and the arguments that it makes */
#ifndef CONV_SHAPE_H
#define CONV_SHAPE_H

typedef struct conv_shape {
    int n, h, wd, c, k, r, s, stride, padding;
} conv_shape;

/* All but the pointers. */
static inline void conv_shape_args(const conv_shape *z, mpt_dtype dtype, int num_valid,
                                   mpt_conv2d_args *a) {
    memset(a, 0, sizeof(*a));
    a->n = z->n;
    a->num_valid = num_valid;
    a->h = z->h;
    a->wd = z->wd;
    a->c = z->c;
    a->k = z->k;
    a->r = z->r;
    a->s = z->s;
    a->stride = z->stride;
    a->padding = z->padding;
    a->p = (z->h + 2 * z->padding - z->r) / z->stride + 1;
    a->q = (z->wd + 2 * z->padding - z->s) / z->stride + 1;
    a->dtype = dtype;
}

#endif
