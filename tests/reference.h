/* reference.h - values computed by PyTorch in float64, from a safetensors file: for tests only

   A safetensors file is a length of 64 bits, a JSON header of that length (name: dtype, shape,
   data_offsets) and the data. Layout there is NCHW and OIHW; here NHWC and KRSC.

       reference_file f = reference_open("layers.safetensors");
       reference_tensor x = reference_get(&f, "conv0.x");     x.data: floats, x.dims: N,H,W,C
       reference_free(&x);
       reference_close(&f); */
#ifndef REFERENCE_H
#define REFERENCE_H

#include "mpt_test.h"

typedef struct reference_file {
    unsigned char *bytes;
    size_t size, data_at;
} reference_file;

typedef struct reference_tensor {
    float *data;
    int64_t dims[4]; /* those that are missing are 1 */
    int num_dims;
    size_t count;
} reference_tensor;

static inline reference_file reference_open(const char *name) {
    reference_file f;
    f.bytes = mpt_test_read_file(mpt_test_data(name), &f.size);
    f.data_at = 8 + (size_t)mpti_load_u64(f.bytes);
    if (f.data_at > f.size) mpt_test_fail(__FILE__, __LINE__, "%s: no safetensors file", name);
    return f;
}

static inline void reference_close(reference_file *f) {
    free(f->bytes);
    f->bytes = NULL;
}

static inline void reference_free(reference_tensor *t) {
    free(t->data);
    t->data = NULL;
}

/* One entry of the header: {"dtype":"F32","shape":[..],"data_offsets":[begin,end]} */
static inline void reference_entry(mpti_json *j, reference_tensor *t, int64_t offsets[2],
                                   int *is_i64) {
    char key[32], dtype[8];
    int i;
    t->num_dims = 0;
    for (i = 0; i < 4; i++) t->dims[i] = 1;
    mpti_json_object(j);
    while (mpti_json_key(j, key, sizeof(key))) {
        if (!strcmp(key, "dtype")) {
            mpti_json_string(j, dtype, sizeof(dtype));
            *is_i64 = !strcmp(dtype, "I64");
        } else if (!strcmp(key, "shape")) {
            mpti_json_array(j);
            while (t->num_dims < 4 && mpti_json_item(j))
                mpti_json_int64(j, &t->dims[t->num_dims++]);
            if (t->num_dims == 4) mpti_json_item(j); /* takes the bracket */
        } else {
            mpti_json_array(j);
            for (i = 0; i < 3 && mpti_json_item(j); i++) mpti_json_int64(j, &offsets[i]);
        }
    }
    j->first = false;
}

static inline void reference_to_nhwc(reference_tensor *t) {
    int64_t n, c, pixel, channels = t->dims[1], pixels = t->dims[2] * t->dims[3];
    float *out = (float *)malloc(t->count * sizeof(float));
    for (n = 0; n < t->dims[0]; n++)
        for (c = 0; c < channels; c++)
            for (pixel = 0; pixel < pixels; pixel++)
                out[(n * pixels + pixel) * channels + c] =
                    t->data[(n * channels + c) * pixels + pixel];
    free(t->data);
    t->data = out;
    t->dims[1] = t->dims[2];
    t->dims[2] = t->dims[3];
    t->dims[3] = channels;
}

static inline reference_tensor reference_get(const reference_file *f, const char *name) {
    reference_tensor t;
    mpti_json j;
    char key[128];
    int64_t offsets[2] = {0, 0};
    int is_i64 = 0, i;
    size_t e;
    memset(&j, 0, sizeof(j));
    memset(&t, 0, sizeof(t));
    j.p = (const char *)f->bytes + 8;
    j.end = (const char *)f->bytes + f->data_at;
    mpti_json_object(&j);
    while (mpti_json_key(&j, key, sizeof(key))) {
        if (strcmp(key, name)) {
            mpti_json_skip(&j);
            continue;
        }
        reference_entry(&j, &t, offsets, &is_i64);
        for (i = 0, t.count = 1; i < t.num_dims; i++) t.count *= (size_t)t.dims[i];
        if (j.bad || f->data_at + (size_t)offsets[1] > f->size ||
            (size_t)(offsets[1] - offsets[0]) != t.count * (is_i64 ? 8 : 4))
            mpt_test_fail(__FILE__, __LINE__, "%s: bad entry in the safetensors header", name);
        t.data = (float *)malloc(t.count * sizeof(float));
        for (e = 0; e < t.count; e++) {
            const unsigned char *p = f->bytes + f->data_at + offsets[0] + e * (is_i64 ? 8 : 4);
            if (is_i64) t.data[e] = (float)(int64_t)mpti_load_u64(p);
            else t.data[e] = mpti_f32_from_bits(mpti_load_u32(p));
        }
        if (t.num_dims == 4) reference_to_nhwc(&t);
        return t;
    }
    mpt_test_fail(__FILE__, __LINE__, "there is no tensor %s", name);
}

#endif /* REFERENCE_H */
