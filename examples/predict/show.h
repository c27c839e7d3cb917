/* predict/show.h - what the network thinks of a picture: a line of text, an object of JSON, or the
   picture itself with bars beside it */
#ifndef PREDICT_SHOW_H
#define PREDICT_SHOW_H

#include "predict/draw.h"
#include "predict/network.h"

enum { PREDICT_MAX_TOP = 100 };

typedef struct predict_item {
    const char *file;           /* of a picture; NULL: a record */
    int64_t record;             /* number among those of --data, from 0 */
    int label;                  /* class; -1: unknown */
    const float *pixels;        /* (size,size,channels), as the network sees them */
    const float *probabilities; /* (num_classes) */
} predict_item;

typedef struct predict_score { /* over records with a label */
    int64_t count, correct, correct_top5;
} predict_score;

/* The n likeliest classes, of equal ones the lower first. */
static void predict_top(const float *probabilities, int num_classes, int n, int *classes) {
    int found = 0, c, at;

    for (c = 0; c < num_classes; c++) {
        for (at = found; at > 0 && probabilities[c] > probabilities[classes[at - 1]]; at--)
            if (at < n) classes[at] = classes[at - 1];
        if (at < n) classes[at] = c;
        if (found < n) found++;
    }
}

static const char *predict_name(const predict_network *n, int class_number, char text[16]) {
    if (n->names) return n->names[class_number];
    snprintf(text, 16, "class %d", class_number);
    return text;
}

static void predict_json(const predict_network *n, const predict_item *item, const int *classes,
                         int top) {
    char number[16];
    int i;

    if (item->file) {
        printf("{\"file\":");
        cli_json_text(stdout, item->file);
    } else {
        printf("{\"record\":%lld", (long long)item->record);
    }
    if (item->label >= 0) {
        printf(",\"label\":%d,\"label_name\":", item->label);
        cli_json_text(stdout, predict_name(n, item->label, number));
    }
    printf(",\"predictions\":[");
    for (i = 0; i < top; i++) {
        printf("%s{\"class\":%d,\"name\":", i ? "," : "", classes[i]);
        cli_json_text(stdout, predict_name(n, classes[i], number));
        printf(",\"probability\":");
        cli_json_float(stdout, item->probabilities[classes[i]]);
        printf("}");
    }
    printf("]}\n");
}

/* Names come from files, pictures' names from anywhere: control characters turn into '?'. */
static void predict_put(const char *text) {
    for (; *text; text++) putchar((unsigned char)*text < 0x20 || *text == 0x7f ? '?' : *text);
}

static void predict_title(const predict_network *n, const predict_item *item, int best) {
    char number[16];

    if (item->file) predict_put(item->file);
    else printf("record %lld", (long long)item->record);
    if (item->label < 0) return;
    printf(", ");
    predict_put(predict_name(n, item->label, number));
    printf(item->label == best ? ", right" : ", wrong");
}

static void predict_text(const predict_network *n, const predict_item *item, const int *classes,
                         int top) {
    char number[16];
    int i;

    predict_title(n, item, classes[0]);
    for (i = 0; i < top; i++) {
        printf("%s", i ? ", " : ": ");
        predict_put(predict_name(n, classes[i], number));
        printf(" %.1f %%", 100 * (double)item->probabilities[classes[i]]);
    }
    printf("\n");
}

static void predict_bar(const predict_network *n, const predict_item *item, int class_number,
                        bool color) {
    const char *green = "\033[32m", *red = "\033[31m";
    double p = (double)item->probabilities[class_number];
    char number[16], bar[] = "####################";

    bar[(int)(p * 20 + 0.5)] = 0;
    printf("%5.1f %% ", 100 * p);
    if (color)
        printf("%s", item->label < 0 ? "\033[36m" : item->label == class_number ? green : red);
    printf("%-20s", bar);
    if (color) printf("\033[0m");
    printf(" ");
    predict_put(predict_name(n, class_number, number));
}

/* The title in the second line, the classes from the fourth on, as far as the picture reaches. */
static void predict_picture(const predict_network *n, const predict_item *item, const int *classes,
                            int top) {
    bool color = cli_use_color(STDOUT_FILENO);
    draw_picture p = draw_take(item->pixels, n->size, n->channels, n->mean, n->std);
    int lines = p.height / 2 > top + 4 ? p.height / 2 : top + 4, line;

    for (line = 0; line < lines; line++) {
        if (line < p.height / 2) draw_line(&p, line, color);
        else printf("%*s", p.width, "");
        printf("  ");
        if (line == 1) predict_title(n, item, classes[0]);
        if (line >= 3 && line < 3 + top) predict_bar(n, item, classes[line - 3], color);
        printf("\n");
    }
}

static void predict_show(const predict_options *o, const predict_network *n,
                         const predict_item *item, predict_score *score) {
    int classes[PREDICT_MAX_TOP], i, top = o->top < n->num_classes ? (int)o->top : n->num_classes;
    int count = n->num_classes < 5 ? n->num_classes : 5;

    if (item->label >= 0) {
        predict_top(item->probabilities, n->num_classes, count, classes);
        score->count++;
        score->correct += classes[0] == item->label;
        for (i = 0; i < count; i++) score->correct_top5 += classes[i] == item->label;
    }
    predict_top(item->probabilities, n->num_classes, top, classes);
    if (o->json) predict_json(n, item, classes, top);
    else if (o->draw) predict_picture(n, item, classes, top);
    else predict_text(n, item, classes, top);
}

static void predict_show_score(const predict_options *o, const predict_score *s) {
    double count = s->count ? (double)s->count : 1;

    if (o->json)
        printf("{\"records\":%lld,\"accuracy\":%.6g,\"top5\":%.6g}\n", (long long)s->count,
               (double)s->correct / count, (double)s->correct_top5 / count);
    else
        printf("%lld record%s: %.2f %% right, %.2f %% among the first five\n", (long long)s->count,
               cli_plural(s->count, "s"), 100 * (double)s->correct / count,
               100 * (double)s->correct_top5 / count);
}

#endif /* PREDICT_SHOW_H */
