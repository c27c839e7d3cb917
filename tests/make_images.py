#!/usr/bin/env python3
"""Makes tests/data/images for tests/test_image.c, which needs no Python itself.

    pip install pillow numpy
    tests/make_images.py FIXTURES      a folder with images.tfrecord and manifest.json

expected.txt   file, tolerance of the means, width, height, mean of red, green, blue (as Pillow or
               the manifest has them)
resize.txt     file, box (x, y, width, height), size: what Pillow makes of picture.png
"""
import io
import json
import os
import struct
import sys
import zlib

import numpy as np
from PIL import Image

OUT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "data", "images")
expected = []


def write(name, data):
    with open(os.path.join(OUT, name), "wb") as f:
        f.write(data)


def encode(image, form, **options):
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


def known(name, data, tolerance):
    """A picture whose means the test compares with Pillow's."""
    write(name, data)
    image = Image.open(io.BytesIO(data)).convert("RGB")
    means = np.asarray(image, np.float64).mean((0, 1))
    expected.append((name, tolerance, *image.size, *means))


def picture(width, height):
    y, x = np.mgrid[0:height, 0:width]
    planes = [128 + 100 * np.sin(x / 5 + y / 9), 128 + 90 * np.cos(x / 4 - y / 7),
              (x * 9 + y * 7) % 256]
    return Image.fromarray(np.clip(np.stack(planes, -1), 0, 255).astype(np.uint8))


def varint(data, at):
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        shift += 7
        at += 1
        if data[at - 1] < 128:
            return value, at


def fields(data):
    """Length-delimited fields of a protobuf message."""
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        size, at = varint(data, at)
        if key & 7 == 2:
            yield key >> 3, data[at:at + size]
            at += size


def first_bytes(data):
    """The first string of a Feature's BytesList."""
    for _, byte_list in fields(data):
        for _, value in fields(byte_list):
            return value
    return b""


def pictures_of(path):
    """name -> encoded picture, of the records written by TensorFlow."""
    with open(path, "rb") as f:
        data = f.read()
    at, found = 0, {}
    while at < len(data):
        size = struct.unpack_from("<Q", data, at)[0]
        record = data[at + 12:at + 12 + size]
        at += 16 + size
        features = {}
        for _, all_features in fields(record):
            for _, entry in fields(all_features):
                parts = dict(fields(entry))
                features[parts[1].decode()] = parts.get(2, b"")
        found[first_bytes(features["name"]).decode()] = first_bytes(features["image/encoded"])
    return found


def chunk(name, data):
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width, height, bits, colour, rows, interlace=0, palette=b""):
    header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, interlace)
    parts = chunk(b"IHDR", header) + (chunk(b"PLTE", palette) if palette else b"")
    parts += chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


def rows_of(samples, bits):
    """samples (height, width * channels) -> filter 0 rows."""
    out = b""
    for row in samples:
        if bits == 16:
            out += b"\0" + row.astype(">u2").tobytes()
        else:
            digits = ((row[:, None] >> np.arange(bits - 1, -1, -1)) & 1).reshape(-1)
            out += b"\0" + np.packbits(digits.astype(np.uint8)).tobytes()
    return out


def interlaced(samples, bits):
    """samples (height, width, channels) -> the seven passes of Adam7."""
    out = b""
    passes = [(0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2),
              (0, 1, 1, 2)]
    for x, y, dx, dy in passes:
        part = samples[y::dy, x::dx]
        if part.size:
            out += rows_of(part.reshape(part.shape[0], -1), bits)
    return out


def both_orders(name, samples, bits, colour, palette=b""):
    """The same picture plain and interlaced: the test wants the same pixels."""
    height, width, _ = samples.shape
    plain, adam7 = rows_of(samples.reshape(height, -1), bits), interlaced(samples, bits)
    write(f"plain-{name}.png", png(width, height, bits, colour, plain, 0, palette))
    write(f"adam7-{name}.png", png(width, height, bits, colour, adam7, 1, palette))


def cmyk(ink, ycck):
    """A JPEG of inks as Photoshop writes it: inverted; ycck: C, M, Y stored as luma and chroma."""
    image = np.empty((16, 16, 4), np.uint8)
    image[:] = ink
    if ycck:
        ycc = Image.fromarray(np.ascontiguousarray(image[..., :3])).convert("YCbCr")
        image[..., :3] = 255 - np.asarray(ycc)  # Pillow inverts all four when it writes
    data = encode(Image.frombytes("CMYK", (16, 16), image.tobytes()), "JPEG", quality=95)
    at = data.index(b"\xff\xee")
    assert data[at + 4:at + 9] == b"Adobe" and data[at + 15] == 0
    return data[:at + 15] + b"\2" + data[at + 16:] if ycck else data


def main():
    fixtures = sys.argv[1]
    os.makedirs(OUT, exist_ok=True)

    with open(os.path.join(fixtures, "manifest.json")) as f:
        manifest = json.load(f)["images.tfrecord"]["pillow"]
    for name, data in pictures_of(os.path.join(fixtures, "images.tfrecord")).items():
        write(f"tf-{name}", data)
        truth = manifest[name]
        if "mean_rgb" in truth and name not in ("gif", "bad-webp"):
            height, width = truth["size_hw"]
            tolerance = 2 if name.startswith("jpeg") else 0.01
            expected.append((f"tf-{name}", tolerance, width, height, *truth["mean_rgb"]))

    image = picture(24, 18)
    known("picture.png", encode(image, "PNG"), 0.01)
    known("picture.bmp", encode(image.crop((0, 0, 13, 9)), "BMP"), 0.01)
    known("baseline.jpg", encode(image, "JPEG", quality=80), 2)
    known("progressive.jpg", encode(image, "JPEG", quality=80, progressive=True), 2)
    larger = picture(80, 40)
    known("restart.jpg", encode(larger, "JPEG", quality=80, restart_marker_blocks=2), 2)
    known("restart-progressive.jpg",
          encode(larger, "JPEG", quality=80, progressive=True, restart_marker_blocks=3), 2)
    known("gray.jpg", encode(image.convert("L"), "JPEG", quality=80), 2)
    known("wide.jpg", encode(picture(160, 120), "JPEG", quality=85), 2)
    known("palette.png", encode(image.quantize(13), "PNG"), 0.01)
    known("a-png.jpg", encode(image, "PNG"), 0.01)
    known("a-jpeg.png", encode(image, "JPEG", quality=80), 2)

    corner = np.zeros((2, 4, 3), np.uint8)
    corner[0, 0] = 255  # top left
    write("corner.jpg", encode(Image.fromarray(corner), "JPEG", quality=100, subsampling=0))

    inks = {"red": (0, 255, 255, 0), "white": (0, 0, 0, 0), "black": (0, 0, 0, 255),
            "blue": (255, 200, 0, 40)}
    for name, ink in inks.items():
        known(f"cmyk-{name}.jpg", cmyk(ink, False), 2)
        known(f"ycck-{name}.jpg", cmyk(ink, True), 2)

    rng = np.random.default_rng(3)
    both_orders("rgb8", rng.integers(0, 256, (11, 13, 3)), 8, 2)
    both_orders("rgba16", rng.integers(0, 65536, (9, 10, 4)), 16, 6)
    both_orders("gray1", rng.integers(0, 2, (9, 17, 1)), 1, 0)
    both_orders("gray4", rng.integers(0, 16, (5, 7, 1)), 4, 0)
    numbers, palette = rng.integers(0, 4, (10, 9, 1)), rng.integers(0, 256, 12).astype(np.uint8)
    both_orders("palette2", numbers, 2, 3, palette.tobytes())

    write("bomb.png", png(8, 8, 8, 2, bytes(1 << 22)))

    boxes = [(0, 0, 24, 18, 10, 10), (3, 2, 15, 12, 5, 9), (0.5, 1.25, 20, 16.5, 7, 6),
             (0, 0, 24, 18, 50, 40), (5, 5, 1, 1, 4, 3), (0, 0, 24, 18, 1, 1),
             (3, 0, 18, 18, 24, 24)]
    sizes = []
    for i, (x, y, w, h, to_w, to_h) in enumerate(boxes):
        name = f"resize-{i}.png"
        small = image.resize((to_w, to_h), Image.BILINEAR, box=(x, y, x + w, y + h))
        write(name, encode(small, "PNG"))
        sizes.append(f"{name} {x} {y} {w} {h} {to_w} {to_h}\n")
    write("resize.txt", "".join(sizes).encode())
    write("expected.txt", "".join("%s %g %d %d %.3f %.3f %.3f\n" % e for e in expected).encode())


main()
