/* test_image.c - >>loader (its pictures): right pixels from every kind of JPEG, PNG and BMP; from a
   damaged one an error that says what is wrong, never a crash and never a half-filled picture.

   tests/data/images comes from tests/make_images.py. */
#define MPTRAIN_IMPLEMENTATION
#include "mptrain.h"

#include "mpt_test.h"

enum { MAX_FILE = 1 << 17 };

/* ---- tools ----------------------------------------------------------------------------------- */
static mpt_ctx *new_ctx(void) {
    mpt_ctx *ctx = NULL;
    CHECK_OK(NULL, mpt_ctx_create(NULL, &ctx));
    return ctx;
}

static mpt_bytes bytes_of(const void *data, size_t size) {
    mpt_bytes b;
    b.data = (const uint8_t *)data;
    b.size = size;
    return b;
}

/* A file of tests/data/images; the block is freed with free((void *)data). */
static mpt_bytes read_image(const char *name) {
    char path[256];
    mpt_bytes b;
    snprintf(path, sizeof path, "images/%s", name);
    b.data = mpt_test_read_file(mpt_test_data(path), &b.size);
    return b;
}

static void free_file(mpt_bytes b) {
    free((void *)(uintptr_t)b.data);
}

static mpt_image decode(mpt_ctx *ctx, mpt_bytes b) {
    mpt_image image;
    CHECK_OK(ctx, mpt_image_decode(ctx, b, NULL, &image));
    CHECK(image.pixels && image.channels == 3);
    return image;
}

/* The decoder refuses b with this code, leaves nothing behind, and says so. */
static void check_refused(mpt_ctx *ctx, mpt_bytes b, mpt_result code, const char *said) {
    mpt_image image;
    CHECK_RESULT(ctx, mpt_image_decode(ctx, b, NULL, &image), code);
    CHECK(!image.pixels && image.width == 0);
    CHECK_CONTAINS(mpt_last_error(ctx)->message, said);
}

static void check_same(const mpt_image *a, const mpt_image *b) {
    CHECK_EQ_INT(a->width, b->width);
    CHECK_EQ_INT(a->height, b->height);
    CHECK_EQ_INT(a->channels, b->channels);
    CHECK_EQ_MEM(a->pixels, b->pixels, (size_t)a->width * (size_t)a->height * (size_t)a->channels);
}

static double mean_of(const mpt_image *image, int channel) {
    size_t n = (size_t)image->width * (size_t)image->height, i;
    double sum = 0;
    for (i = 0; i < n; i++) sum += image->pixels[i * (size_t)image->channels + (size_t)channel];
    return sum / (double)n;
}

static uint32_t next_random(uint64_t *state) { /* xorshift64, Marsaglia 2003 */
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return (uint32_t)(*state >> 32);
}

/* Building files: a buffer that bytes are put into. */
typedef struct builder {
    uint8_t data[MAX_FILE];
    size_t size;
} builder;

static void put(builder *b, const void *data, size_t size) {
    CHECK(b->size + size <= sizeof b->data);
    if (size) memcpy(b->data + b->size, data, size);
    b->size += size;
}

static void put_uint(builder *b, uint32_t value, int size, int big_endian) {
    int i;
    for (i = 0; i < size; i++) {
        uint8_t byte = (uint8_t)(value >> 8 * (big_endian ? size - 1 - i : i));
        put(b, &byte, 1);
    }
}

static void put_chunk(builder *b, const char *name, const void *data, size_t size) {
    size_t start = b->size + 4;
    put_uint(b, (uint32_t)size, 4, 1);
    put(b, name, 4);
    put(b, data, size);
    put_uint(b, mpt_crc32(0, b->data + start, size + 4), 4, 1);
}

static void put_png_header(builder *b, uint32_t w, uint32_t h, int bits, int colour, int adam7) {
    builder header;
    header.size = 0;
    put_uint(&header, w, 4, 1);
    put_uint(&header, h, 4, 1);
    put_uint(&header, (uint32_t)bits, 1, 1);
    put_uint(&header, (uint32_t)colour, 1, 1);
    put_uint(&header, (uint32_t)adam7, 3, 1);
    put(b, "\x89PNG\r\n\x1a\n", 8);
    put_chunk(b, "IHDR", header.data, header.size);
}

/* raw as one stored deflate block (RFC 1951, 3.2.4) in a zlib stream (RFC 1950) */
static void put_idat(builder *b, const void *raw, size_t size) {
    const uint8_t *p = (const uint8_t *)raw;
    uint32_t s1 = 1, s2 = 0;
    builder stream;
    size_t i;
    stream.size = 0;
    put(&stream, "\x78\x01\x01", 3);
    put_uint(&stream, (uint32_t)size, 2, 0);
    put_uint(&stream, ~(uint32_t)size, 2, 0);
    put(&stream, raw, size);
    for (i = 0; i < size; i++) {
        s1 = (s1 + p[i]) % 65521;
        s2 = (s2 + s1) % 65521;
    }
    put_uint(&stream, s2 << 16 | s1, 4, 1);
    put_chunk(b, "IDAT", stream.data, stream.size);
}

/* ---- good pictures --------------------------------------------------------------------------- */

/* O-14: by content, whatever the name says (a-png.jpg, a-jpeg.png). Means of Pillow; JPEG within
   2 levels (decoders round and upsample differently), PNG and BMP within expected.txt's digits. */
MPT_TEST(means_are_those_of_pillow) {
    mpt_bytes list = read_image("expected.txt");
    const char *p = (const char *)list.data;
    mpt_ctx *ctx = new_ctx();
    int n = 0, used;
    char name[64];
    double tolerance, means[3];
    int w, h, c;

    while (sscanf(p, "%63s %lf %d %d %lf %lf %lf%n", name, &tolerance, &w, &h, &means[0], &means[1],
                  &means[2], &used) == 7) {
        mpt_bytes file = read_image(name);
        mpt_image image = decode(ctx, file);
        mpt_image_info info;
        CHECK_EQ_INT(image.width, w);
        CHECK_EQ_INT(image.height, h);
        for (c = 0; c < 3; c++) CHECK_NEAR(mean_of(&image, c), means[c], tolerance);
        CHECK_OK(ctx, mpt_image_probe(ctx, file, &info));
        CHECK(info.width == w && info.height == h);
        mpt_image_free(ctx, &image);
        CHECK(!image.pixels);
        free_file(file);
        p += used;
        n++;
    }
    CHECK_EQ_INT(n, 33);
    free_file(list);
    mpt_ctx_destroy(ctx);
}

MPT_TEST(gray_output) {
    static const char *const names[] = {"baseline.jpg", "gray.jpg",    "cmyk-blue.jpg",
                                        "picture.png",  "palette.png", "picture.bmp",
                                        "restart.jpg"};
    mpt_ctx *ctx = new_ctx();
    mpt_image_desc desc;
    size_t i;

    memset(&desc, 0, sizeof desc);
    desc.channels = 1;
    for (i = 0; i < sizeof names / sizeof names[0]; i++) {
        mpt_bytes file = read_image(names[i]);
        mpt_image colour = decode(ctx, file), gray;
        double luma =
            (77 * mean_of(&colour, 0) + 150 * mean_of(&colour, 1) + 29 * mean_of(&colour, 2)) / 256;
        CHECK_OK(ctx, mpt_image_decode(ctx, file, &desc, &gray));
        CHECK_EQ_INT(gray.channels, 1);
        /* each pixel is cut down to a whole level; clipping of JPEG's colours adds a bit */
        CHECK_NEAR(mean_of(&gray, 0), luma, 2);
        mpt_image_free(ctx, &colour);
        mpt_image_free(ctx, &gray);
        free_file(file);
    }
    mpt_ctx_destroy(ctx);
}

/* O-19: a 2 x 2 PNG of each kind: pixels 0, a, b, c give the gray or colour levels expected. */
static void check_png(mpt_ctx *ctx, int bits, int colour, int adam7, const char *palette,
                      size_t palette_size, const char *raw, size_t raw_size, const char *want) {
    static const char filler[] = "Comment\0a text chunk to pass over";
    builder b;
    mpt_image image;
    b.size = 0;
    put_png_header(&b, 2, 2, bits, colour, adam7);
    put_chunk(&b, "tEXt", filler, sizeof filler);
    if (palette) put_chunk(&b, "PLTE", palette, palette_size);
    if (colour == 0) put_chunk(&b, "tRNS", "\0\1", 2);
    put_idat(&b, raw, raw_size);
    put_chunk(&b, "IEND", NULL, 0);
    image = decode(ctx, bytes_of(b.data, b.size));
    CHECK(image.width == 2 && image.height == 2);
    CHECK_EQ_MEM(image.pixels, want, 12);
    mpt_image_free(ctx, &image);
}

MPT_TEST(png_of_every_kind_O_19) {
    static const char gray[] = "\x00\x00\x00\xff\xff\xff\xff\xff\xff\x00\x00\x00";
    static const char colours[] = "\x01\x02\x03\x04\x05\x06\x07\x08\x09\x0a\x0b\x0c";
    mpt_ctx *ctx = new_ctx();

    check_png(ctx, 1, 0, 0, NULL, 0, "\0\x40\0\x80", 4, gray);
    check_png(ctx, 2, 0, 0, NULL, 0, "\0\x30\0\xc0", 4, gray);
    check_png(ctx, 4, 0, 0, NULL, 0, "\0\x0f\0\xf0", 4, gray);
    check_png(ctx, 8, 0, 0, NULL, 0, "\0\x00\xff\0\xff\x00", 6, gray);
    check_png(ctx, 2, 0, 0, NULL, 0, "\0\x10\0\x80", 4, "\0\0\0\x55\x55\x55\xaa\xaa\xaa\0\0\0");
    check_png(ctx, 16, 0, 0, NULL, 0, "\0\xab\xcd\0\xff\0\x12\x34\x80\0", 10,
              "\xab\xab\xab\x00\x00\x00\x12\x12\x12\x80\x80\x80"); /* 0xABCD becomes 171 */
    check_png(ctx, 8, 4, 0, NULL, 0, "\0\x00\x11\xff\x22\0\xff\x00\x00\xff", 10, gray);
    check_png(ctx, 16, 4, 0, NULL, 0, "\0\0\0\1\1\xff\xff\2\2\0\xff\xff\0\0\0\0\3\3", 18, gray);
    check_png(ctx, 8, 2, 0, NULL, 0, "\0\1\2\3\4\5\6\0\7\x8\x9\xa\xb\xc", 14, colours);
    check_png(ctx, 8, 6, 0, NULL, 0, "\0\1\2\3\0\4\5\6\xff\0\7\x8\x9\0\xa\xb\xc\x80", 18, colours);
    check_png(ctx, 16, 2, 0, NULL, 0,
              "\0\1\xff\2\xff\3\xff\4\0\5\0\6\0\0\7\0\x8\0\x9\0\xa\0\xb\0\xc\0", 26, colours);
    check_png(ctx, 16, 6, 0, NULL, 0,
              "\0\1\0\2\0\3\0\0\0\4\0\5\0\6\0\xff\xff\0\7\0\x8\0\x9\0\0\0\xa\0\xb\0\xc\0\1\1", 34,
              colours);
    check_png(ctx, 1, 3, 0, "\1\2\3\4\5\6", 6, "\0\x40\0\x80", 4, "\1\2\3\4\5\6\4\5\6\1\2\3");
    check_png(ctx, 2, 3, 0, colours, 12, "\0\x10\0\xb0", 4, colours);
    check_png(ctx, 4, 3, 0, colours, 12, "\0\x01\0\x23", 4, colours);
    check_png(ctx, 8, 3, 0, colours, 12, "\0\0\1\0\2\3", 6, colours);
    check_png(ctx, 8, 2, 1, NULL, 0, "\0\1\2\3\0\4\5\6\0\7\x8\x9\xa\xb\xc", 15,
              colours); /* interlaced */
    /* numbers beyond the palette are black, not what happened to lie in memory */
    check_png(ctx, 8, 3, 0, "\1\2\3", 3, "\0\0\1\0\xff\0", 6, "\1\2\3\0\0\0\0\0\0\1\2\3");
    mpt_ctx_destroy(ctx);
}

MPT_TEST(interlaced_png_equals_plain_O_19) {
    static const char *const kinds[] = {"rgb8", "rgba16", "gray1", "gray4", "palette2"};
    mpt_ctx *ctx = new_ctx();
    size_t i;
    for (i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        char name[64];
        mpt_bytes a, b;
        mpt_image plain, adam7;
        snprintf(name, sizeof name, "plain-%s.png", kinds[i]);
        a = read_image(name);
        snprintf(name, sizeof name, "adam7-%s.png", kinds[i]);
        b = read_image(name);
        plain = decode(ctx, a);
        adam7 = decode(ctx, b);
        check_same(&plain, &adam7);
        mpt_image_free(ctx, &plain);
        mpt_image_free(ctx, &adam7);
        free_file(a);
        free_file(b);
    }
    mpt_ctx_destroy(ctx);
}

/* A BMP of 2 x 2 pixels; extra: masks and palette between header and rows. */
static void put_bmp(builder *b, int height, int bits, uint32_t compression, uint32_t colours,
                    const char *extra, size_t extra_size, const char *rows, size_t rows_size) {
    b->size = 0;
    put(b, "BM\0\0\0\0\0\0\0\0", 10);
    put_uint(b, (uint32_t)(54 + extra_size), 4, 0);
    put_uint(b, 40, 4, 0);
    put_uint(b, 2, 4, 0);
    put_uint(b, (uint32_t)height, 4, 0);
    put_uint(b, 1, 2, 0);
    put_uint(b, (uint32_t)bits, 2, 0);
    put_uint(b, compression, 4, 0);
    put(b, "\0\0\0\0\0\0\0\0\0\0\0\0", 12);
    put_uint(b, colours, 4, 0);
    put_uint(b, 0, 4, 0);
    put(b, extra, extra_size);
    put(b, rows, rows_size);
}

static void check_bmp(mpt_ctx *ctx, const builder *b, const char *want) {
    mpt_image image = decode(ctx, bytes_of(b->data, b->size));
    CHECK(image.width == 2 && image.height == 2);
    CHECK_EQ_MEM(image.pixels, want, 12);
    mpt_image_free(ctx, &image);
}

MPT_TEST(bmp_of_every_kind) {
    static const char colours[] = "\x01\x02\x03\x04\x05\x06\x07\x08\x09\x0a\x0b\x0c";
    static const char palette[] = "\3\2\1\0\6\5\4\0\x9\x8\7\0\xc\xb\xa\0"; /* blue, green, red, 0 */
    static const char rows24[] = "\x9\x8\7\xc\xb\xa\0\0\3\2\1\6\5\4\0\0";  /* bottom row first */
    static const char bad[] = "\3\2\1\0";
    builder b;
    mpt_ctx *ctx = new_ctx();
    size_t cut;

    put_bmp(&b, 2, 24, 0, 0, "", 0, rows24, 16);
    check_bmp(ctx, &b, colours);
    put_bmp(&b, -2, 24, 0, 0, "", 0, "\3\2\1\6\5\4\0\0\x9\x8\7\xc\xb\xa\0\0", 16);
    check_bmp(ctx, &b, colours);
    put_bmp(&b, 2, 24, 0, 0, "a gap", 5, rows24, 16);
    check_bmp(ctx, &b, colours);
    put_bmp(&b, 2, 1, 0, 2, palette, 8, "\x40\0\0\0\x40\0\0\0\0\0", 10);
    check_bmp(ctx, &b, "\1\2\3\4\5\6\1\2\3\4\5\6");
    put_bmp(&b, 2, 4, 0, 4, palette, 16, "\x23\0\0\0\x01\0\0\0", 8);
    check_bmp(ctx, &b, colours);
    put_bmp(&b, 2, 8, 0, 0, palette, 16, "\2\3\0\0\0\1\0\0", 8);
    check_bmp(ctx, &b, colours);
    put_bmp(&b, 2, 8, 0, 0, bad, 4, "\0\xff\0\0\1\0\0\0", 8); /* beyond the palette: black */
    check_bmp(ctx, &b, "\0\0\0\1\2\3\1\2\3\0\0\0");
    put_bmp(&b, 2, 32, 0, 0, "", 0, "\x9\x8\7\xff\xc\xb\xa\0\3\2\1\x80\6\5\4\0", 16);
    check_bmp(ctx, &b, colours);
    put_bmp(&b, 2, 32, 3, 0, "\xff\0\0\0\0\xff\0\0\0\0\xff\0", 12,
            "\7\x8\x9\0\xa\xb\xc\0\1\2\3\0\4\5\6\0", 16);
    check_bmp(ctx, &b, colours);
    put_bmp(&b, 2, 16, 0, 0, "", 0, "\xff\x7f\0\0\x1f\0\xe0\x3", 8); /* 5 bits each */
    check_bmp(ctx, &b, "\0\0\xff\0\xff\0\xff\xff\xff\0\0\0");
    put_bmp(&b, 2, 16, 3, 0, "\0\xf8\0\0\xe0\7\0\0\x1f\0\0\0", 12, "\xff\xff\0\0\0\xf8\xe0\x7",
            8); /* 5, 6, 5 */
    check_bmp(ctx, &b, "\xff\0\0\0\xff\0\xff\xff\xff\0\0\0");

    put_bmp(&b, 2, 8, 1, 0, palette, 16, rows24, 16);
    check_refused(ctx, bytes_of(b.data, b.size), MPT_ERR_UNSUPPORTED, "RLE");
    put_bmp(&b, 2, 7, 0, 0, palette, 16, rows24, 16);
    check_refused(ctx, bytes_of(b.data, b.size), MPT_ERR_UNSUPPORTED, "7 bits");
    put_bmp(&b, 2, 32, 3, 0, "\0\0\0\0\0\xff\0\0\0\0\xff\0", 12, rows24, 16);
    check_refused(ctx, bytes_of(b.data, b.size), MPT_ERR_CORRUPT_DATA, "masks");
    put_bmp(&b, INT32_MIN, 24, 0, 0, "", 0, rows24, 16);
    check_refused(ctx, bytes_of(b.data, b.size), MPT_ERR_CORRUPT_DATA, "max_pixels");
    put_bmp(&b, 0, 24, 0, 0, "", 0, rows24, 16);
    check_refused(ctx, bytes_of(b.data, b.size), MPT_ERR_CORRUPT_DATA, "without pixels");
    put_bmp(&b, 2, 24, 0, 0, "", 0, rows24, 16);
    for (cut = 2; cut < b.size; cut++)
        check_refused(ctx, bytes_of(b.data, cut), MPT_ERR_CORRUPT_DATA, "truncated");
    mpt_ctx_destroy(ctx);
}

/* ---- O-12, O-18: what is no picture of ours -------------------------------------------------- */
MPT_TEST(wrong_bytes_get_a_hint_O_12) {
    static const struct {
        const char *bytes;
        size_t size;
        mpt_result code;
        const char *says, *also;
    } cases[] = {
        {"", 0, MPT_ERR_CORRUPT_DATA, "the value is empty", "0 bytes"},
        {"/9j/4AAQSkZJRg", 14, MPT_ERR_CORRUPT_DATA, "base64",
         "14 bytes: 2f 39 6a 2f 34 41 41 51 ..."},
        {"iVBORw0KGgoAAA", 14, MPT_ERR_CORRUPT_DATA, "base64", "69 56 42 4f"},
        {"Qk02AAAAAAAA", 12, MPT_ERR_CORRUPT_DATA, "base64", "51 6b 30"},
        {"  <!DOCTYPE html><html>", 23, MPT_ERR_CORRUPT_DATA, "HTML or XML text", "20 20 3c"},
        {"no such object\n", 15, MPT_ERR_CORRUPT_DATA, "this is text", "6e 6f"},
        {"\1\2\3", 3, MPT_ERR_CORRUPT_DATA, "not a JPEG, PNG or BMP", "(3 bytes: 01 02 03)"},
        {"GIF89a\0\0\0\0", 10, MPT_ERR_UNSUPPORTED, "GIF picture: convert", "47 49 46"},
        {"RIFF\0\0\0\0WEBPVP8 ", 16, MPT_ERR_UNSUPPORTED, "WebP", "52 49"},
        {"II*\0\0\0\0\0", 8, MPT_ERR_UNSUPPORTED, "TIFF", "49 49 2a 00"},
        {"MM\0*\0\0\0\0", 8, MPT_ERR_UNSUPPORTED, "TIFF", "4d 4d"},
        {"8BPS\0\1", 6, MPT_ERR_UNSUPPORTED, "PSD", "38 42"},
        {"#?RADIANCE\n", 11, MPT_ERR_UNSUPPORTED, "HDR", "23 3f"},
        {"P6\n2 2\n", 7, MPT_ERR_UNSUPPORTED, "PNM", "50 36"},
        {"\0\0\2\0\0\0\0\0\0\0\0\0\x81\x5a\x81\x5a\x18\0", 18, MPT_ERR_CORRUPT_DATA, "not a JPEG",
         "00 00 02"},
        {"\x89PNG\n\x1a\n\0\0", 9, MPT_ERR_CORRUPT_DATA, "signature",
         "89 50"}, /* sent as text: \r lost */
        {"\xff\xd8\xff", 3, MPT_ERR_CORRUPT_DATA, "truncated", "ff d8 ff"},
        {"BM", 2, MPT_ERR_CORRUPT_DATA, "truncated", "42 4d"},
    };
    mpt_ctx *ctx = new_ctx();
    mpt_error err;
    uint8_t raw[4 * 5 * 3];
    mpt_image image;
    mpt_image_desc desc = mpti_image_desc_defaults(NULL);
    size_t i;

    for (i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        mpt_bytes b = bytes_of(cases[i].bytes, cases[i].size);
        mpt_image_info info;
        check_refused(ctx, b, cases[i].code, cases[i].says);
        CHECK_CONTAINS(mpt_last_error(ctx)->message, cases[i].also);
        CHECK_RESULT(ctx, mpt_image_probe(ctx, b, &info), cases[i].code);
        CHECK_EQ_INT(mpt_image_probe(NULL, b, &info), cases[i].code);
    }
    /* h * w * 3 bytes: raw pixels */
    memset(raw, 200, sizeof raw);
    memset(&err, 0, sizeof err);
    CHECK_EQ_INT(mpti_image_decode(&ctx->desc.allocator, bytes_of(raw, sizeof raw), &desc, &err,
                                   &image),
                 MPT_ERR_CORRUPT_DATA);
    mpti_image_hint_raw(bytes_of(raw, sizeof raw), 4, 5, 1, &err);
    CHECK(!strstr(err.message, "raw"));
    mpti_image_hint_raw(bytes_of(raw, sizeof raw), 4, 5, 3, &err);
    CHECK_CONTAINS(err.message, "60 bytes = 4 x 5 x 3: raw pixels? set raw_pixels");
    CHECK_CONTAINS(err.message, "c8 c8 c8 c8 c8 c8 c8 c8");
    mpt_ctx_destroy(ctx);
}

/* The same bytes with and without an error to fill in: nobody has to ask why. */
MPT_TEST(arguments) {
    mpt_ctx *ctx = new_ctx();
    mpt_bytes file = read_image("baseline.jpg"), nothing = bytes_of(NULL, 5);
    mpt_image_desc desc;
    mpt_image image;
    mpt_image_info info;

    memset(&desc, 0, sizeof desc);
    CHECK_RESULT(ctx, mpt_image_decode(ctx, nothing, NULL, &image), MPT_ERR_INVALID_ARGUMENT);
    CHECK_RESULT(ctx, mpt_image_decode(ctx, file, NULL, NULL), MPT_ERR_INVALID_ARGUMENT);
    CHECK_EQ_INT(mpt_image_decode(NULL, file, NULL, &image), MPT_ERR_INVALID_ARGUMENT);
    CHECK_RESULT(ctx, mpt_image_probe(ctx, nothing, &info), MPT_ERR_INVALID_ARGUMENT);
    desc.channels = 4;
    CHECK_RESULT(ctx, mpt_image_decode(ctx, file, &desc, &image), MPT_ERR_INVALID_ARGUMENT);
    CHECK_CONTAINS(mpt_last_error(ctx)->message, "channels");
    desc.channels = 0;
    desc.max_pixels = 24 * 18 - 1;
    CHECK_RESULT(ctx, mpt_image_decode(ctx, file, &desc, &image), MPT_ERR_CORRUPT_DATA);
    CHECK_CONTAINS(mpt_last_error(ctx)->message, "24 x 18 pixels: more than max_pixels = 431");
    desc.max_pixels++;
    CHECK_OK(ctx, mpt_image_decode(ctx, file, &desc, &image));
    mpt_image_free(ctx, &image);
    desc.max_bytes = (int64_t)file.size - 1;
    CHECK_RESULT(ctx, mpt_image_decode(ctx, file, &desc, &image), MPT_ERR_CORRUPT_DATA);
    CHECK_CONTAINS(mpt_last_error(ctx)->message, "max_bytes");
    desc.max_bytes++;
    CHECK_OK(ctx, mpt_image_decode(ctx, file, &desc, &image));
    mpt_image_free(ctx, &image);
    mpt_image_free(ctx, NULL);
    CHECK_EQ_STR(mpt_image_format_string(MPT_IMAGE_WEBP), "WebP");
    CHECK_EQ_STR(mpt_image_format_string((mpt_image_format)77), "unknown");
    free_file(file);
    mpt_ctx_destroy(ctx);
}

MPT_TEST(probe_reads_headers) {
    static const struct {
        const char *name;
        mpt_image_format format;
        int channels, bits, orientation;
    } cases[] = {{"baseline.jpg", MPT_IMAGE_JPEG, 3, 8, 1},
                 {"gray.jpg", MPT_IMAGE_JPEG, 1, 8, 1},
                 {"cmyk-red.jpg", MPT_IMAGE_JPEG, 4, 8, 1},
                 {"tf-jpeg-exif-rotated", MPT_IMAGE_JPEG, 3, 8, 6},
                 {"plain-rgba16.png", MPT_IMAGE_PNG, 4, 16, 1},
                 {"plain-gray1.png", MPT_IMAGE_PNG, 1, 1, 1},
                 {"palette.png", MPT_IMAGE_PNG, 3, 8, 1},
                 {"picture.bmp", MPT_IMAGE_BMP, 3, 8, 1},
                 {"tf-bad-jpeg-truncated", MPT_IMAGE_JPEG, 3, 8, 1}};
    mpt_ctx *ctx = new_ctx();
    size_t i;
    for (i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        mpt_bytes file = read_image(cases[i].name);
        mpt_image_info info;
        CHECK_OK(ctx, mpt_image_probe(ctx, file, &info));
        CHECK_EQ_INT(info.format, cases[i].format);
        CHECK_EQ_INT(info.channels, cases[i].channels);
        CHECK_EQ_INT(info.bits, cases[i].bits);
        CHECK_EQ_INT(info.orientation, cases[i].orientation);
        free_file(file);
    }
    mpt_ctx_destroy(ctx);
}

/* ---- JPEG ------------------------------------------------------------------------------------ */

/* Position of the first marker ff code in a JPEG, behind the start marker. */
static size_t find_marker(mpt_bytes b, int code) {
    size_t at = 2;
    while (at + 4 <= b.size && b.data[at] == 0xff && b.data[at + 1] != code)
        at += 2u + (size_t)(b.data[at + 2] << 8 | b.data[at + 3]);
    CHECK(at + 4 <= b.size && b.data[at] == 0xff);
    return at;
}

static size_t scan_start(mpt_bytes b) { /* entropy-coded data of the first scan */
    size_t at = find_marker(b, 0xda);
    return at + 2u + (size_t)(b.data[at + 2] << 8 | b.data[at + 3]);
}

/* O-15: with Adobe's marker right colours (the means, above), without it one named refusal. */
MPT_TEST(cmyk_without_adobe_marker_is_refused_O_15) {
    static const char *const names[] = {"cmyk-red.jpg", "cmyk-white.jpg", "cmyk-black.jpg",
                                        "ycck-blue.jpg"};
    mpt_ctx *ctx = new_ctx();
    size_t i;
    for (i = 0; i < 4; i++) {
        mpt_bytes file = read_image(names[i]);
        size_t at = find_marker(file, 0xee),
               size = 2u + (size_t)(file.data[at + 2] << 8 | file.data[at + 3]);
        builder b;
        b.size = 0;
        put(&b, file.data, at);
        put(&b, file.data + at + size, file.size - at - size);
        check_refused(ctx, bytes_of(b.data, b.size), MPT_ERR_UNSUPPORTED,
                      "4-component JPEG without an Adobe marker");
        memcpy(b.data, file.data, file.size);
        b.data[at + 15] = 1; /* a transform that is not defined for four components */
        check_refused(ctx, bytes_of(b.data, file.size), MPT_ERR_UNSUPPORTED, "Adobe");
        free_file(file);
    }
    mpt_ctx_destroy(ctx);
}

static void put_byte(builder *b, int value, size_t times) {
    for (; times > 0; times--) put_uint(b, (uint32_t)value, 1, 1);
}

/* O-16: whatever follows the end, fill bytes before markers, stray restart markers, rubbish of one
   value behind the scan: the same pixels as the clean file. */
static void check_extra_bytes(mpt_ctx *ctx, mpt_bytes file) {
    mpt_image clean = decode(ctx, file), other;
    size_t i, kind;
    builder b;

    for (kind = 0; kind < 9; kind++) {
        size_t cut = kind < 3    ? file.size
                     : kind < 7  ? file.size - 2
                     : kind == 7 ? find_marker(file, 0xdb)
                                 : 2;
        b.size = 0;
        put(&b, file.data, cut);
        if (kind == 0) put_byte(&b, 0, 64);
        if (kind == 1) put(&b, file.data, file.size); /* a second picture */
        if (kind == 2) put(&b, "\xff\xd1\xff\xff\xff\xda rubbish", 15);
        if (kind == 3) put(&b, "\xff\xd1", 2);
        if (kind == 4) put(&b, "\xff\xff\xff\xff", 4);
        if (kind == 5) put_byte(&b, 0, 2047);
        if (kind == 6) put(&b, "\0\0\0\xff\xd1\0\0\xff\xff\xd1", 10);
        if (kind == 7) put(&b, "\xff\xff\xff\xff\xd3\0\0", 7);
        if (kind == 8) { /* unknown applications' data, as long as a segment can be */
            put(&b, "\xff\xeb\xff\xff", 4);
            put_byte(&b, 0xff, 65533);
        }
        put(&b, file.data + cut, file.size - cut);
        other = decode(ctx, bytes_of(b.data, b.size));
        check_same(&clean, &other);
        mpt_image_free(ctx, &other);
    }
    /* a restart marker in the middle of a scan that has none */
    for (i = scan_start(file) + 1; file.data[i] != 0xff || file.data[i + 1] == 0; i += 1) {
        if (file.data[i - 1] == 0xff) continue; /* between ff and its 0 */
        b.size = 0;
        put(&b, file.data, i);
        put(&b, "\xff\xd5", 2);
        put(&b, file.data + i, file.size - i);
        other = decode(ctx, bytes_of(b.data, b.size));
        check_same(&clean, &other);
        mpt_image_free(ctx, &other);
    }
    mpt_image_free(ctx, &clean);
}

MPT_TEST(extra_bytes_do_not_matter_O_16) {
    static const char *const names[] = {"baseline.jpg", "progressive.jpg", "gray.jpg",
                                        "tf-jpeg-444"};
    mpt_ctx *ctx = new_ctx();
    size_t i;
    for (i = 0; i < sizeof names / sizeof names[0]; i++) {
        mpt_bytes file = read_image(names[i]);
        check_extra_bytes(ctx, file);
        free_file(file);
    }
    mpt_ctx_destroy(ctx);
}

/* O-17: header good, data random. A picture of this size never passes: too few or too many bits for
   its blocks are noticed, not only codes that don't exist. */
static void check_random_data(mpt_ctx *ctx, const char *name, int tries) {
    mpt_bytes file = read_image(name);
    size_t start = scan_start(file), i;
    uint8_t *copy = (uint8_t *)malloc(file.size);
    mpt_image image;
    int t;

    CHECK(copy);
    for (t = 0; t < tries; t++) {
        uint64_t state = 88172645463325252u + (uint64_t)t * 7919;
        memcpy(copy, file.data, file.size);
        for (i = start; i < file.size - 2; i++) {
            copy[i] = (uint8_t)next_random(&state);
            if (t % 2 && copy[i] == 0xff)
                copy[i] = 0; /* without any marker it is harder to notice */
        }
        CHECK(mpt_image_decode(ctx, bytes_of(copy, file.size), NULL, &image) < 0);
        CHECK_CONTAINS(mpt_last_error(ctx)->message, "JPEG");
    }
    for (t = 0; t < 3; t++) { /* all the same, as lost disk blocks leave it */
        memset(copy + start, t == 0 ? 0 : t == 1 ? 0xaa : 0x55, file.size - 2 - start);
        check_refused(ctx, bytes_of(copy, file.size), MPT_ERR_CORRUPT_DATA, "JPEG");
    }
    free(copy);
    free_file(file);
}

MPT_TEST(random_scan_data_are_noticed_O_17) {
    mpt_ctx *ctx = new_ctx();
    int tries = mpt_test_full() ? 2000 : 200;
    check_random_data(ctx, "wide.jpg", tries);
    check_random_data(ctx, "tf-jpeg-444", tries);
    check_random_data(ctx, "tf-jpeg-cmyk", tries);
    check_random_data(ctx, "restart.jpg", tries);
    mpt_ctx_destroy(ctx);
}

/* Every cut of a file with its end marker put back: half a picture, complete at first sight. */
MPT_TEST(scans_that_end_early_are_noticed_O_17) {
    static const char *const names[] = {"wide.jpg", "restart.jpg", "tf-jpeg-444", "tf-jpeg-gray"};
    mpt_ctx *ctx = new_ctx();
    size_t i, cut;
    for (i = 0; i < sizeof names / sizeof names[0]; i++) {
        mpt_bytes file = read_image(names[i]);
        uint8_t *copy = (uint8_t *)malloc(file.size);
        CHECK(copy);
        /* the decoder reads 4 bytes ahead: so much of the last block may be missing unnoticed */
        for (cut = scan_start(file); cut < file.size - 2 - 6; cut += mpt_test_full() ? 1 : 13) {
            memcpy(copy, file.data, cut);
            if (copy[cut - 1] == 0xff) copy[cut - 1] = 0;
            memcpy(copy + cut, "\xff\xd9", 2);
            check_refused(ctx, bytes_of(copy, cut + 2), MPT_ERR_CORRUPT_DATA, "JPEG");
        }
        free(copy);
        free_file(file);
    }
    mpt_ctx_destroy(ctx);
}

MPT_TEST(lost_restart_markers_are_noticed) {
    mpt_ctx *ctx = new_ctx();
    mpt_bytes file = read_image("restart.jpg");
    uint8_t *copy = (uint8_t *)malloc(file.size);
    size_t at, markers = 0;

    CHECK(copy);
    for (at = scan_start(file); at + 2 < file.size; at++) {
        if (file.data[at] != 0xff || file.data[at + 1] < 0xd0 || file.data[at + 1] > 0xd7) continue;
        memcpy(copy, file.data, at);
        memcpy(copy + at, file.data + at + 2, file.size - at - 2);
        check_refused(ctx, bytes_of(copy, file.size - 2), MPT_ERR_CORRUPT_DATA,
                      "restart markers are missing");
        markers++;
    }
    CHECK_EQ_INT(markers, 7); /* 5 x 3 blocks of 16 x 16, two in an interval */
    free(copy);
    free_file(file);
    mpt_ctx_destroy(ctx);
}

MPT_TEST(kinds_of_jpeg_are_refused_by_name) {
    static const struct {
        int code, bits;
        const char *says;
    } cases[] = {{0xc3, 8, "lossless"},     {0xf7, 8, "lossless"},   {0xc5, 8, "hierarchical"},
                 {0xde, 8, "hierarchical"}, {0xc9, 8, "arithmetic"}, {0xca, 8, "arithmetic"},
                 {0xc1, 12, "12 bits"}};
    mpt_ctx *ctx = new_ctx();
    mpt_bytes file = read_image("baseline.jpg");
    size_t frame = find_marker(file, 0xc0), i;
    uint8_t *copy = (uint8_t *)malloc(file.size);

    CHECK(copy);
    for (i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        memcpy(copy, file.data, file.size);
        copy[frame + 1] = (uint8_t)cases[i].code;
        copy[frame + 4] = (uint8_t)cases[i].bits;
        check_refused(ctx, bytes_of(copy, file.size), MPT_ERR_UNSUPPORTED, cases[i].says);
    }
    memcpy(copy, file.data, file.size);
    memset(copy + frame + 5, 0, 2);
    check_refused(ctx, bytes_of(copy, file.size), MPT_ERR_UNSUPPORTED, "height");
    free(copy);
    free_file(file);
    mpt_ctx_destroy(ctx);
}

/* What the decoder would take on trust: tables with too many codes, tables and colours that aren't
   there, a thousand scans. */
MPT_TEST(crafted_jpegs_are_refused_O_18) {
    mpt_ctx *ctx = new_ctx();
    mpt_bytes file = read_image("baseline.jpg");
    size_t table = find_marker(file, 0xc4), scan = find_marker(file, 0xda),
           size = file.size - scan - 2, i;
    builder b;

    for (i = 0; i < 3; i++) {
        b.size = 0;
        put(&b, file.data, table);
        put(&b, "\xff\xc4", 2);
        put_uint(&b, i == 0 ? 2 + 17 + 16 * 255 : i == 1 ? 2 + 17 + 3 : 2 + 17 + 1, 2, 1);
        put_byte(&b, 0x10 * (i < 2), 1);
        if (i == 0) put_byte(&b, 255, 16 + 16 * 255); /* 4080 codes */
        if (i == 1)
            put(&b, "\3\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\1\2\3", 19); /* three codes of one bit */
        if (i == 2) put(&b, "\1\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\x0f", 17); /* a DC value of 15 bits */
        put(&b, file.data + table, file.size - table);
        check_refused(ctx, bytes_of(b.data, b.size), MPT_ERR_CORRUPT_DATA, "Huffman table");
    }
    for (i = 0; i < 2; i++) { /* without its Huffman tables, without its quantisation tables */
        size_t at = find_marker(file, i ? 0xdb : 0xc4);
        b.size = 0;
        put(&b, file.data, file.size);
        while (b.data[at + 1] == (i ? 0xdb : 0xc4)) {
            b.data[at + 1] = 0xfe; /* a comment */
            at += 2u + (size_t)(b.data[at + 2] << 8 | b.data[at + 3]);
        }
        check_refused(ctx, bytes_of(b.data, b.size), MPT_ERR_CORRUPT_DATA,
                      "table that isn't there");
    }
    b.size = 0;
    put(&b, file.data, scan);
    put(&b, "\xff\xd9", 2);
    check_refused(ctx, bytes_of(b.data, b.size), MPT_ERR_CORRUPT_DATA, "before all of its colours");
    b.size = 0;
    put(&b, file.data, scan);
    for (i = 0; i < 600 && b.size + size < sizeof b.data - 2; i++)
        put(&b, file.data + scan, 14 + 4);
    put(&b, "\xff\xd9", 2);
    check_refused(ctx, bytes_of(b.data, b.size), MPT_ERR_CORRUPT_DATA, "scans");
    free_file(file);
    mpt_ctx_destroy(ctx);
}

/* O-20: a bright corner at the top left as stored. Where orientation n of EXIF shows it. */
static void put_exif(builder *b, int big, int orientation, int type) {
    put(b,
        "\xff\xe1\0\x3a"
        "Exif\0\0",
        10);
    put(b, big ? "MM\0*" : "II*\0", 4);
    put_uint(b, 8, 4, big);
    put_uint(b, 2, 2, big);
    put_uint(b, 0x010f, 2, big); /* another tag first */
    put_uint(b, 2, 2, big);
    put_uint(b, 4, 4, big);
    put(b, "abc\0", 4);
    put_uint(b, 0x0112, 2, big);
    put_uint(b, (uint32_t)type, 2, big);
    put_uint(b, 1, 4, big);
    put_uint(b, (uint32_t)orientation, 2, big);
    put_byte(b, 0, 2 + 4 + 12);
}

MPT_TEST(all_orientations_O_20) {
    static const int corner_x[9] = {0, 0, 1, 1, 0, 0, 1, 1, 0},
                     corner_y[9] = {0, 0, 0, 1, 1, 0, 0, 1, 1};
    mpt_ctx *ctx = new_ctx();
    mpt_bytes file = read_image("corner.jpg");
    mpt_image stored = decode(ctx, file), image;
    mpt_image_desc desc;
    int n, big;
    builder b;

    CHECK(stored.width == 4 && stored.height == 2 && stored.pixels[0] > 250 &&
          stored.pixels[3] < 5);
    memset(&desc, 0, sizeof desc);
    for (n = 1; n <= 8; n++) {
        for (big = 0; big < 2; big++) {
            int w = n < 5 ? 4 : 2, h = n < 5 ? 2 : 4, x = corner_x[n] * (w - 1),
                y = corner_y[n] * (h - 1), i;
            b.size = 0;
            put(&b, file.data, 2);
            put_exif(&b, big, n, 3);
            put(&b, file.data + 2, file.size - 2);
            desc.apply_exif = 0;
            CHECK_OK(ctx, mpt_image_decode(ctx, bytes_of(b.data, b.size), &desc, &image));
            check_same(&image, &stored);
            mpt_image_free(ctx, &image);
            desc.apply_exif = 1;
            CHECK_OK(ctx, mpt_image_decode(ctx, bytes_of(b.data, b.size), &desc, &image));
            CHECK(image.width == w && image.height == h);
            for (i = 0; i < 8; i++) CHECK((image.pixels[3 * i] > 128) == (i == y * w + x));
            mpt_image_free(ctx, &image);
        }
    }
    mpt_image_free(ctx, &stored);
    free_file(file);
    mpt_ctx_destroy(ctx);
}

/* O-20: a damaged EXIF block is ignored, whichever byte is wrong and wherever it ends. */
MPT_TEST(damaged_exif_is_ignored_O_20) {
    mpt_ctx *ctx = new_ctx();
    mpt_bytes file = read_image("corner.jpg");
    mpt_image image;
    mpt_image_desc desc;
    builder b;
    size_t i;
    int bit;

    memset(&desc, 0, sizeof desc);
    desc.apply_exif = 1;
    for (i = 4; i < 60; i++) {
        for (bit = 0; bit < 8; bit++) {
            b.size = 0;
            put(&b, file.data, 2);
            put_exif(&b, 1, 6, 3);
            b.data[2 + i] ^= (uint8_t)(1 << bit);
            put(&b, file.data + 2, file.size - 2);
            CHECK_OK(ctx, mpt_image_decode(ctx, bytes_of(b.data, b.size), &desc, &image));
            mpt_image_free(ctx, &image);
        }
        b.size = 0;
        put(&b, file.data, 2);
        put_exif(&b, 0, 6, 3);
        b.size = 2 + i;
        b.data[5] = (uint8_t)(i - 2); /* the segment ends here */
        put(&b, file.data + 2, file.size - 2);
        CHECK_OK(ctx, mpt_image_decode(ctx, bytes_of(b.data, b.size), &desc, &image));
        mpt_image_free(ctx, &image);
    }
    free_file(file);
    mpt_ctx_destroy(ctx);
}

/* ---- damage of every kind -------------------------------------------------------------------- */

/* A cut anywhere is an error: "a truncated picture is never half-filled". */
MPT_TEST(every_cut_is_an_error) {
    static const char *const names[] = {"baseline.jpg",  "progressive.jpg",  "restart.jpg",
                                        "cmyk-blue.jpg", "picture.png",      "palette.png",
                                        "picture.bmp",   "plain-rgba16.png", "adam7-palette2.png"};
    mpt_ctx *ctx = new_ctx();
    size_t i, cut;
    for (i = 0; i < sizeof names / sizeof names[0]; i++) {
        mpt_bytes file = read_image(names[i]);
        for (cut = 0; cut < file.size; cut++) {
            uint8_t *copy = (uint8_t *)malloc(cut + 1); /* ends where the file ends, for ASan */
            mpt_image image;
            CHECK(copy);
            memcpy(copy, file.data, cut);
            CHECK_RESULT(ctx, mpt_image_decode(ctx, bytes_of(copy, cut), NULL, &image),
                         MPT_ERR_CORRUPT_DATA);
            CHECK(!image.pixels);
            if (cut > 12) CHECK_CONTAINS(mpt_last_error(ctx)->message, "truncated");
            free(copy);
        }
        free_file(file);
    }
    mpt_ctx_destroy(ctx);
}

MPT_TEST(damaged_png_is_refused) {
    mpt_ctx *ctx = new_ctx();
    mpt_bytes file = read_image("picture.png"), truncated = read_image("tf-bad-jpeg-truncated");
    uint8_t *copy = (uint8_t *)malloc(file.size);
    static const char raw[16] = {0};
    builder b;
    size_t i;

    CHECK(copy);
    for (i = 8; i < file.size; i++) { /* checksums: any byte of any chunk */
        memcpy(copy, file.data, file.size);
        copy[i] ^= 0x20;
        check_refused(ctx, bytes_of(copy, file.size), MPT_ERR_CORRUPT_DATA, "PNG");
    }
    for (i = 0; i < 14; i++) { /* rows are missing; 14 bytes would be right */
        b.size = 0;
        put_png_header(&b, 2, 2, 8, 2, 0);
        put_idat(&b, raw, i);
        put_chunk(&b, "IEND", NULL, 0);
        check_refused(ctx, bytes_of(b.data, b.size), MPT_ERR_CORRUPT_DATA, "compressed data");
    }
    b.size = 0;
    put_png_header(&b, 2, 2, 8, 2, 0);
    put_chunk(&b, "IEND", NULL, 0);
    check_refused(ctx, bytes_of(b.data, b.size), MPT_ERR_CORRUPT_DATA, "without its pixels");
    b.size = 0;
    put_png_header(&b, 2, 2, 8, 3, 0);
    put_idat(&b, "\0\0\0\0\0\0", 6);
    put_chunk(&b, "IEND", NULL, 0);
    check_refused(ctx, bytes_of(b.data, b.size), MPT_ERR_CORRUPT_DATA, "without its palette");
    b.size = 0;
    put_png_header(&b, 2, 2, 3, 2, 0);
    check_refused(ctx, bytes_of(b.data, b.size), MPT_ERR_CORRUPT_DATA, "impossible header");
    b.size = 0;
    put(&b, "\x89PNG\r\n\x1a\n", 8);
    put_chunk(&b, "CgBI", "\x30\0\x20\6", 4);
    check_refused(ctx, bytes_of(b.data, b.size), MPT_ERR_UNSUPPORTED, "CgBI");
    b.size = 0;
    put_png_header(&b, 2, 2, 8, 2, 0);
    put_chunk(&b, "ABCD", NULL, 0);
    check_refused(ctx, bytes_of(b.data, b.size), MPT_ERR_UNSUPPORTED, "ABCD");
    check_refused(ctx, truncated, MPT_ERR_CORRUPT_DATA, "truncated");
    free(copy);
    free_file(file);
    free_file(truncated);
    mpt_ctx_destroy(ctx);
}

/* O-18: claims of 60000 x 60000 pixels, and 8 x 8 that unpack to 4 MiB. */
MPT_TEST(bombs_cost_no_memory_O_18) {
    mpt_test_allocator memory;
    mpt_ctx_desc desc;
    mpt_ctx *ctx = NULL;
    mpt_bytes file = read_image("baseline.jpg"), bomb = read_image("bomb.png");
    builder b;
    int64_t before;

    mpt_test_allocator_init(&memory, 0, 0);
    memset(&desc, 0, sizeof desc);
    desc.allocator = memory.hooks;
    CHECK_OK(NULL, mpt_ctx_create(&desc, &ctx));
    before = memory.num_allocs;
    b.size = 0;
    put_png_header(&b, 60000, 60000, 8, 2, 0);
    check_refused(ctx, bytes_of(b.data, b.size), MPT_ERR_CORRUPT_DATA,
                  "60000 x 60000 pixels: more than max_pixels");
    b.size = 0;
    put_png_header(&b, 0xffffffffu, 0xffffffffu, 8, 2, 0);
    check_refused(ctx, bytes_of(b.data, b.size), MPT_ERR_CORRUPT_DATA, "max_pixels");
    b.size = 0;
    put(&b, file.data, file.size);
    memcpy(b.data + find_marker(file, 0xc0) + 5, "\xea\x60\xea\x60", 4);
    check_refused(ctx, bytes_of(b.data, b.size), MPT_ERR_CORRUPT_DATA, "60000 x 60000");
    CHECK_EQ_INT(memory.num_allocs, before);
    check_refused(ctx, bomb, MPT_ERR_CORRUPT_DATA, "compressed data");
    CHECK(memory.peak_bytes < 1 << 18);
    mpt_ctx_destroy(ctx);
    CHECK_NO_LEAK(&memory);
    free_file(file);
    free_file(bomb);
}

/* O-18: bytes changed, moved, cut out at random: any result, but no bad access (ASan, UBSan), no
   leak, and the same result again. Checksums of PNG are made right, or all would end there. */
static void mend_png(uint8_t *p, size_t size) {
    size_t at = 8;
    while (at + 12 <= size) {
        size_t n = mpti_load_uint(p + at, 4, true);
        uint32_t crc;
        if (n > size - at - 12) return;
        crc = mpt_crc32(0, p + at + 4, n + 4);
        p[at + 8 + n] = (uint8_t)(crc >> 24);
        p[at + 9 + n] = (uint8_t)(crc >> 16);
        p[at + 10 + n] = (uint8_t)(crc >> 8);
        p[at + 11 + n] = (uint8_t)crc;
        at += n + 12;
    }
}

static size_t mutate(uint8_t *p, size_t size, uint64_t *state) {
    uint32_t changes = 1 + next_random(state) % 4;
    for (; changes > 0; changes--) {
        size_t at = next_random(state) % size, n = 1 + next_random(state) % 16;
        if (n > size - at) n = size - at;
        switch (next_random(state) % 6) {
        case 0: p[at] = (uint8_t)next_random(state); break;
        case 1: p[at] ^= (uint8_t)(1u << next_random(state) % 8); break;
        case 2: p[at] = next_random(state) % 2 ? 0xff : 0; break;
        case 3: memset(p + at, (int)(next_random(state) & 255), n); break;
        case 4: memmove(p + at, p + next_random(state) % (size - n + 1), n); break;
        default:
            memmove(p + at, p + at + n, size - at - n);
            size -= n;
            if (size < 32) return size;
        }
    }
    return size;
}

MPT_TEST(mutants_do_no_harm_O_18) {
    static const char *const names[] = {
        "baseline.jpg",   "progressive.jpg",    "restart.jpg",     "restart-progressive.jpg",
        "gray.jpg",       "cmyk-blue.jpg",      "ycck-blue.jpg",   "wide.jpg",
        "picture.png",    "palette.png",        "picture.bmp",     "plain-gray4.png",
        "adam7-rgb8.png", "adam7-palette2.png", "plain-rgba16.png"};
    enum { NUM_NAMES = sizeof names / sizeof names[0] };
    int per_file = mpt_test_full() ? 10000 / NUM_NAMES + 1 : 40, t;
    mpt_test_allocator memory;
    mpt_ctx_desc desc;
    mpt_image_desc image_desc;
    mpt_ctx *ctx = NULL;
    size_t i;

    mpt_test_allocator_init(&memory, 0, 0);
    memset(&desc, 0, sizeof desc);
    memset(&image_desc, 0, sizeof image_desc);
    image_desc.max_pixels = 1 << 20; /* keeps the mutants with huge sizes quick */
    desc.allocator = memory.hooks;
    CHECK_OK(NULL, mpt_ctx_create(&desc, &ctx));
    for (i = 0; i < NUM_NAMES; i++) {
        mpt_bytes file = read_image(names[i]);
        for (t = 0; t < per_file; t++) {
            uint64_t state = 1 + (uint64_t)t * 2654435761u + i * 97;
            uint8_t *copy = (uint8_t *)malloc(file.size);
            mpt_image a, b;
            mpt_bytes m;
            mpt_result rc;
            CHECK(copy);
            memcpy(copy, file.data, file.size);
            m = bytes_of(copy, mutate(copy, file.size, &state));
            if (file.data[1] == 'P') mend_png(copy, m.size);
            image_desc.channels = t % 2 ? 1 : 3;
            image_desc.apply_exif = t % 3 == 0;
            rc = mpt_image_decode(ctx, m, &image_desc, &a);
            CHECK_EQ_INT(mpt_image_decode(ctx, m, &image_desc, &b), rc);
            CHECK(rc == MPT_OK || rc == MPT_ERR_CORRUPT_DATA || rc == MPT_ERR_UNSUPPORTED);
            if (rc == MPT_OK) check_same(&a, &b);
            mpt_image_free(ctx, &a);
            mpt_image_free(ctx, &b);
            free(copy);
        }
        free_file(file);
    }
    mpt_ctx_destroy(ctx);
    CHECK_NO_LEAK(&memory);
}

/* The n-th allocation fails, for every n: an error each time, nothing leaks. */
MPT_TEST(every_allocation_may_fail) {
    static const char *const names[] = {"baseline.jpg", "progressive.jpg",  "cmyk-blue.jpg",
                                        "picture.png",  "plain-rgba16.png", "adam7-rgb8.png",
                                        "palette.png",  "picture.bmp",      "tf-jpeg-exif-rotated"};
    size_t i;
    for (i = 0; i < sizeof names / sizeof names[0]; i++) {
        mpt_bytes file = read_image(names[i]);
        mpt_image_desc desc = mpti_image_desc_defaults(NULL);
        int64_t n;
        desc.apply_exif = 1;
        for (n = 1;; n++) {
            mpt_test_allocator memory;
            mpt_image image;
            mpti_box box = {0, 0, 10, 9};
            uint8_t small[5 * 5 * 3];
            mpt_error err;
            mpt_result rc;
            mpt_test_allocator_init(&memory, n, 0);
            memset(&err, 0, sizeof err);
            rc = mpti_image_decode(&memory.hooks, file, &desc, &err, &image);
            if (rc == MPT_OK)
                rc = mpti_image_resample(&memory.hooks, &image, &box, 5, 5, false, small, &err);
            CHECK_EQ_INT(rc, memory.has_failed ? MPT_ERR_OUT_OF_MEMORY : MPT_OK);
            if (rc) CHECK_CONTAINS(err.message, "no memory");
            mpti_image_free(&memory.hooks, &image);
            CHECK_NO_LEAK(&memory);
            if (!memory.has_failed) break;
        }
        CHECK(n > 2);
        free_file(file);
    }
}

/* ---- O-21: threads --------------------------------------------------------------------------- */
enum { NUM_THREADS = 16, NUM_GOOD = 5, NUM_BAD = 5 };
static const char *const thread_names[NUM_GOOD + NUM_BAD] = {
    "baseline.jpg",          "progressive.jpg", "picture.png", "palette.png", "picture.bmp",
    "tf-bad-jpeg-truncated", "tf-bad-noise",    "tf-gif",      "bomb.png",    "tf-bad-empty"};
static const char *const thread_reasons[NUM_BAD] = {"JPEG: the picture is truncated",
                                                    "not a JPEG, PNG or BMP", "a GIF picture",
                                                    "PNG: the compressed data",
                                                    "the value is empty"};
typedef struct thread_work {
    mpt_bytes files[NUM_GOOD + NUM_BAD];
    mpt_image right[NUM_GOOD];
    int number, rounds;
} thread_work;

static void *decode_on_thread(void *arg) {
    thread_work *w = (thread_work *)arg;
    mpt_ctx *ctx = new_ctx();
    int i;
    for (i = 0; i < w->rounds; i++) {
        int k = (i * 7 + w->number) % (NUM_GOOD + NUM_BAD);
        mpt_image image;
        mpt_result rc = mpt_image_decode(ctx, w->files[k], NULL, &image);
        if (k < NUM_GOOD) {
            CHECK_EQ_INT(rc, MPT_OK);
            check_same(&image, &w->right[k]);
        } else {
            CHECK(rc < 0);
            CHECK_CONTAINS(mpt_last_error(ctx)->message, thread_reasons[k - NUM_GOOD]);
        }
        mpt_image_free(ctx, &image);
    }
    mpt_ctx_destroy(ctx);
    return NULL;
}

MPT_TEST(threads_decode_good_and_bad_O_21) {
    static thread_work work[NUM_THREADS];
    pthread_t threads[NUM_THREADS];
    mpt_ctx *ctx = new_ctx();
    int i, k;

    for (k = 0; k < NUM_GOOD + NUM_BAD; k++) work[0].files[k] = read_image(thread_names[k]);
    for (k = 0; k < NUM_GOOD; k++) work[0].right[k] = decode(ctx, work[0].files[k]);
    for (i = 0; i < NUM_THREADS; i++) {
        work[i] = work[0];
        work[i].number = i;
        work[i].rounds = mpt_test_full() ? 10000 / NUM_THREADS : 60;
    }
    for (i = 0; i < NUM_THREADS; i++)
        CHECK(pthread_create(&threads[i], NULL, decode_on_thread, &work[i]) == 0);
    for (i = 0; i < NUM_THREADS; i++) pthread_join(threads[i], NULL);
    for (k = 0; k < NUM_GOOD; k++) mpt_image_free(ctx, &work[0].right[k]);
    for (k = 0; k < NUM_GOOD + NUM_BAD; k++) free_file(work[0].files[k]);
    mpt_ctx_destroy(ctx);
}

/* ---- resizing -------------------------------------------------------------------------------- */
static void resample(const mpt_image *src, double x, double y, double w, double h, int out_w,
                     int out_h, bool flip, uint8_t *out) {
    mpt_allocator allocator;
    mpti_box box;
    mpt_error err;
    memset(&allocator, 0, sizeof allocator);
    box.x = x;
    box.y = y;
    box.width = w;
    box.height = h;
    CHECK_EQ_INT(mpti_image_resample(&allocator, src, &box, out_w, out_h, flip, out, &err), MPT_OK);
}

/* Within one level of Pillow, which rounds between its passes too, but the other way round. */
MPT_TEST(resize_is_that_of_pillow) {
    mpt_ctx *ctx = new_ctx();
    mpt_bytes file = read_image("picture.png"), list = read_image("resize.txt");
    mpt_image picture = decode(ctx, file);
    const char *p = (const char *)list.data;
    static uint8_t plain[50 * 50 * 3], mirrored[50 * 50 * 3];
    int n = 0, used, out_w, out_h, i, c;
    double x, y, w, h;
    char name[64];

    while (sscanf(p, "%63s %lf %lf %lf %lf %d %d%n", name, &x, &y, &w, &h, &out_w, &out_h, &used) ==
           7) {
        mpt_bytes right_file = read_image(name);
        mpt_image right = decode(ctx, right_file);
        CHECK(right.width == out_w && right.height == out_h);
        resample(&picture, x, y, w, h, out_w, out_h, false, plain);
        resample(&picture, x, y, w, h, out_w, out_h, true, mirrored);
        for (i = 0; i < out_w * out_h; i++) {
            int other = i / out_w * out_w + out_w - 1 - i % out_w;
            for (c = 0; c < 3; c++) {
                CHECK_NEAR(plain[3 * i + c], right.pixels[3 * i + c], 1);
                CHECK_EQ_INT(plain[3 * i + c], mirrored[3 * other + c]);
            }
        }
        mpt_image_free(ctx, &right);
        free_file(right_file);
        p += used;
        n++;
    }
    CHECK_EQ_INT(n, 7);
    mpt_image_free(ctx, &picture);
    free_file(list);
    free_file(file);
    mpt_ctx_destroy(ctx);
}

MPT_TEST(resize_without_change_is_a_copy) {
    uint8_t pixels[6 * 5], out[6 * 5];
    mpt_image image;
    int i;
    for (i = 0; i < 30; i++) pixels[i] = (uint8_t)(i * 8);
    image.pixels = pixels;
    image.width = 6;
    image.height = 5;
    image.channels = 1;
    resample(&image, 0, 0, 6, 5, 6, 5, false, out);
    CHECK_EQ_MEM(out, pixels, 30);
    resample(&image, 2, 1, 3, 2, 3, 2, false, out);
    for (i = 0; i < 6; i++) CHECK_EQ_INT(out[i], pixels[(1 + i / 3) * 6 + 2 + i % 3]);
    resample(&image, 2, 1, 3, 2, 3, 2, true, out);
    for (i = 0; i < 6; i++) CHECK_EQ_INT(out[i], pixels[(1 + i / 3) * 6 + 4 - i % 3]);
}

/* One colour stays that colour, to the last level, at any scale. Every machine gives the same bits:
   the checksum is that of the first build. */
MPT_TEST(resize_keeps_white_and_bits) {
    static uint8_t pixels[97 * 61 * 3], out[200 * 200 * 3];
    static const int sizes[][2] = {{1, 1}, {7, 5}, {96, 61}, {97, 60}, {97, 200}, {200, 200}};
    mpt_image image;
    uint64_t state = 42;
    uint32_t crc = 0;
    size_t i, k;

    image.pixels = pixels;
    image.width = 97;
    image.height = 61;
    image.channels = 3;
    for (i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        size_t n = (size_t)sizes[i][0] * (size_t)sizes[i][1] * 3;
        memset(pixels, 255, sizeof pixels);
        resample(&image, 0, 0, 97, 61, sizes[i][0], sizes[i][1], false, out);
        for (k = 0; k < n; k++) CHECK_EQ_INT(out[k], 255);
        for (k = 0; k < sizeof pixels; k++) pixels[k] = (uint8_t)next_random(&state);
        resample(&image, 3.7, 1.1, 90.25, 50, sizes[i][0], sizes[i][1], true, out);
        crc = mpt_crc32(crc, out, n);
    }
    CHECK_EQ_INT(crc, 2771246766u);
}

/* Any box inside the picture works; a box beyond it, or none, is an error and touches nothing. */
MPT_TEST(resize_boxes) {
    static uint8_t pixels[33 * 20], out[64 * 64];
    static const double bad[][4] = {{-1, 0, 5, 5},    {0, -1, 5, 5}, {0, 0, 34, 5},
                                    {30, 0, 4, 5},    {0, 0, 0, 5},  {0, 0, 5, -2},
                                    {0, 0, 1e300, 5}, {40, 0, 1, 1}, {0, 19, 3, 1.5}};
    mpt_allocator allocator;
    mpt_error err;
    mpt_image image;
    mpti_box box;
    uint64_t state = 7;
    size_t i;
    int t;

    memset(&allocator, 0, sizeof allocator);
    image.pixels = pixels;
    image.width = 33;
    image.height = 20;
    image.channels = 1;
    for (t = 0; t < 2000; t++) {
        double x = next_random(&state) % 1000 / 1000.0 * 32,
               y = next_random(&state) % 1000 / 1000.0 * 19;
        double w = (33 - x) * (1 + next_random(&state) % 1000) / 1000,
               h = (20 - y) * (1 + next_random(&state) % 1000) / 1000;
        resample(&image, x, y, w, h, 1 + (int)(next_random(&state) % 64),
                 1 + (int)(next_random(&state) % 64), t & 1, out);
    }
    for (i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        box.x = bad[i][0];
        box.y = bad[i][1];
        box.width = bad[i][2];
        box.height = bad[i][3];
        CHECK_EQ_INT(mpti_image_resample(&allocator, &image, &box, 8, 8, false, out, &err),
                     MPT_ERR_INVALID_ARGUMENT);
    }
    box.x = box.y = 0;
    box.width = box.height = mpti_f32_from_bits(0x7fc00000u); /* NaN */
    CHECK_EQ_INT(mpti_image_resample(&allocator, &image, &box, 8, 8, false, out, &err),
                 MPT_ERR_INVALID_ARGUMENT);
    box.width = box.height = 5;
    CHECK_EQ_INT(mpti_image_resample(&allocator, &image, &box, 0, 8, false, out, &err),
                 MPT_ERR_INVALID_ARGUMENT);
    CHECK_EQ_INT(mpti_image_resample(&allocator, &image, &box, 8, 40000, false, out, &err),
                 MPT_ERR_INVALID_ARGUMENT);
}

static const mpt_test_case tests[] = {
    MPT_TEST_CASE(means_are_those_of_pillow),
    MPT_TEST_CASE(gray_output),
    MPT_TEST_CASE(png_of_every_kind_O_19),
    MPT_TEST_CASE(interlaced_png_equals_plain_O_19),
    MPT_TEST_CASE(bmp_of_every_kind),
    MPT_TEST_CASE(wrong_bytes_get_a_hint_O_12),
    MPT_TEST_CASE(arguments),
    MPT_TEST_CASE(probe_reads_headers),
    MPT_TEST_CASE(cmyk_without_adobe_marker_is_refused_O_15),
    MPT_TEST_CASE(extra_bytes_do_not_matter_O_16),
    MPT_TEST_CASE(random_scan_data_are_noticed_O_17),
    MPT_TEST_CASE(scans_that_end_early_are_noticed_O_17),
    MPT_TEST_CASE(lost_restart_markers_are_noticed),
    MPT_TEST_CASE(kinds_of_jpeg_are_refused_by_name),
    MPT_TEST_CASE(crafted_jpegs_are_refused_O_18),
    MPT_TEST_CASE(all_orientations_O_20),
    MPT_TEST_CASE(damaged_exif_is_ignored_O_20),
    MPT_TEST_CASE(every_cut_is_an_error),
    MPT_TEST_CASE(damaged_png_is_refused),
    MPT_TEST_CASE(bombs_cost_no_memory_O_18),
    MPT_TEST_CASE(mutants_do_no_harm_O_18),
    MPT_TEST_CASE(every_allocation_may_fail),
    MPT_TEST_CASE(threads_decode_good_and_bad_O_21),
    MPT_TEST_CASE(resize_is_that_of_pillow),
    MPT_TEST_CASE(resize_without_change_is_a_copy),
    MPT_TEST_CASE(resize_keeps_white_and_bits),
    MPT_TEST_CASE(resize_boxes),
};

int main(int argc, char **argv) {
    return mpt_test_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
