/* tfrecord/png.h - pixels to PNG (ISO/IEC 15948): 8 bits, gray or RGB, no filter, one IDAT chunk */
#ifndef TFRECORD_PNG_H
#define TFRECORD_PNG_H

#include "tfrecord/common.h"
#ifdef MPTRAIN_ZLIB
#include <zlib.h>

static void png_u32(uint8_t *p, uint32_t v) { /* big-endian, as all of PNG */
    p[0] = (uint8_t)(v >> 24);
    p[1] = (uint8_t)(v >> 16);
    p[2] = (uint8_t)(v >> 8);
    p[3] = (uint8_t)v;
}

/* A chunk whose data stand at out->data + out->size + 8 already: adds length, type and CRC. */
static void png_chunk(byte_buffer *out, const char type[4], size_t size) {
    uint8_t *p = out->data + out->size;

    png_u32(p, (uint32_t)size);
    memcpy(p + 4, type, 4);
    png_u32(p + 8 + size, mpt_crc32(0, p + 4, size + 4));
    out->size += size + 12;
}

typedef struct png_encoder { /* kept from picture to picture: starting zlib costs more than work */
    z_stream stream;
    bool started;
    byte_buffer rows;
} png_encoder;

static void png_encoder_free(png_encoder *e) {
    if (e->started) deflateEnd(&e->stream);
    byte_buffer_free(&e->rows);
    memset(e, 0, sizeof *e);
}

static bool png_start(png_encoder *e) {
    if (e->started) return deflateReset(&e->stream) == Z_OK;
    memset(&e->stream, 0, sizeof e->stream);
    e->started = deflateInit(&e->stream, 9) == Z_OK;
    return e->started;
}

/* Rows with their filter byte (0: none) in front, deflated to where the chunk's data stand. */
static bool png_deflate(png_encoder *e, const uint8_t *pixels, int64_t height, size_t row,
                        byte_buffer *out, size_t *size) {
    size_t bytes = (size_t)height * (row + 1), bound;
    int64_t y;

    if (!byte_buffer_reserve(&e->rows, bytes) || !png_start(e)) return false;
    for (y = 0; y < height; y++) {
        uint8_t *line = e->rows.data + (size_t)y * (row + 1);
        line[0] = 0;
        memcpy(line + 1, pixels + (size_t)y * row, row);
    }
    bound = deflateBound(&e->stream, (uLong)bytes);
    if (!byte_buffer_reserve(out, out->size + bound + 64)) return false;
    e->stream.next_in = e->rows.data;
    e->stream.avail_in = (uInt)bytes;
    e->stream.next_out = out->data + out->size + 8;
    e->stream.avail_out = (uInt)bound;
    if (deflate(&e->stream, Z_FINISH) != Z_STREAM_END) return false;
    *size = bound - e->stream.avail_out;
    return true;
}

/* pixels [height][width][channels], channels 1 or 3; height * width * channels fits 31 bits. */
static bool png_encode(png_encoder *e, const uint8_t *pixels, int64_t height, int64_t width,
                       int channels, byte_buffer *out, char why[600]) {
    static const uint8_t signature[8] = {0x89, 'P', 'N', 'G', '\r', '\n', 0x1a, '\n'};
    size_t row = (size_t)width * (size_t)channels, size;
    uint8_t *header;

    snprintf(why, 600, "no memory for a picture");
    if (!byte_buffer_reserve(out, 64)) return false;
    memcpy(out->data, signature, 8);
    out->size = 8;
    header = out->data + out->size + 8;
    png_u32(header, (uint32_t)width);
    png_u32(header + 4, (uint32_t)height);
    header[8] = 8;                            /* bits */
    header[9] = channels == 3 ? 2 : 0;        /* colour type: RGB, gray */
    header[10] = header[11] = header[12] = 0; /* deflate, adaptive filters, not interlaced */
    png_chunk(out, "IHDR", 13);
    if (!png_deflate(e, pixels, height, row, out, &size)) return false;
    png_chunk(out, "IDAT", size);
    png_chunk(out, "IEND", 0);
    why[0] = 0;
    return true;
}
#else
typedef struct png_encoder {
    int unused;
} png_encoder;

static void png_encoder_free(png_encoder *e) {
    (void)e;
}

static bool png_encode(png_encoder *e, const uint8_t *pixels, int64_t height, int64_t width,
                       int channels, byte_buffer *out, char why[600]) {
    (void)e, (void)pixels, (void)height, (void)width, (void)channels, (void)out;
    snprintf(why, 600, "this build can't write PNG: build with -DMPTRAIN_ZLIB and -lz");
    return false;
}
#endif

#endif /* TFRECORD_PNG_H */
