/* predict/draw.h - small pictures as characters

   On a terminal each character stands for two pixels, one above the other: the upper half block in
   the colour of the upper one, before the colour of the lower one. Elsewhere, and where NO_COLOR is
   set, ten shades of ASCII. */
#ifndef PREDICT_DRAW_H
#define PREDICT_DRAW_H

#include "common/cli.h"

enum { DRAW_MAX_COLUMNS = 32, DRAW_MAX_ROWS = 32 };

/* Pixels as bytes, shrunk to at most 32 x 32. */
typedef struct draw_picture {
    int width, height; /* height is even */
    uint8_t rgb[DRAW_MAX_ROWS][DRAW_MAX_COLUMNS][3];
} draw_picture;

/* Mean of the pixels that fall on a place; x: (size,size,channels), normalised. */
static uint8_t draw_shrink(const float *x, int size, int channels, int channel, int row, int column,
                           const draw_picture *p, float mean, float std) {
    int y0 = row * size / p->height, y1 = (row + 1) * size / p->height, y, c;
    int x0 = column * size / p->width, x1 = (column + 1) * size / p->width;
    float sum = 0, value;

    if (y1 <= y0) y1 = y0 + 1;
    if (x1 <= x0) x1 = x0 + 1;
    for (y = y0; y < y1; y++)
        for (c = x0; c < x1; c++) sum += x[(y * size + c) * channels + channel];
    value = 255 * (sum / (float)((y1 - y0) * (x1 - x0)) * std + mean);
    return value < 0 ? 0 : value > 255 ? 255 : (uint8_t)(value + 0.5f);
}

static draw_picture draw_take(const float *x, int size, int channels, const float mean[3],
                              const float std[3]) {
    draw_picture p;
    int row, column, c;

    p.width = size < DRAW_MAX_COLUMNS ? size : DRAW_MAX_COLUMNS;
    p.height = (size < DRAW_MAX_ROWS ? size + 1 : DRAW_MAX_ROWS) / 2 * 2;
    for (row = 0; row < p.height; row++)
        for (column = 0; column < p.width; column++)
            for (c = 0; c < 3; c++) {
                int k = channels == 3 ? c : 0;
                p.rgb[row][column][c] = draw_shrink(x, size, channels, k, row, column, &p, mean[k],
                                                    std[k]);
            }
    return p;
}

/* Rec. 601 luma. */
static int draw_luma(const uint8_t rgb[3]) {
    return (299 * rgb[0] + 587 * rgb[1] + 114 * rgb[2]) / 1000;
}

/* Rows 2*line and 2*line+1. */
static void draw_line(const draw_picture *p, int line, bool color) {
    static const char shades[] = " .:-=+*#%@";
    int column;

    for (column = 0; column < p->width; column++) {
        const uint8_t *above = p->rgb[2 * line][column], *below = p->rgb[2 * line + 1][column];
        if (color)
            printf("\033[38;2;%d;%d;%d;48;2;%d;%d;%dm\xe2\x96\x80", above[0], above[1], above[2],
                   below[0], below[1], below[2]);
        else putchar(shades[(draw_luma(above) + draw_luma(below)) / 2 * 10 / 256]);
    }
    if (color) printf("\033[0m");
}

#endif /* PREDICT_DRAW_H */
