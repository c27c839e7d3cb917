#!/usr/bin/env python3
"""Turns the manifest of the TensorFlow fixtures into tests/data/fixtures.txt, which C tests read.

usage: make_fixtures_txt.py manifest.json > tests/data/fixtures.txt

The manifest says what TensorFlow 2.21 reads from each file. The text has one item a line:

    file NAME COMPRESSION RECORDS DAMAGED    DAMAGED 1: an error follows, not the end
    record CRC32 LENGTH VALID                CRC32 as zlib has it; VALID 1: a tf.Example
    feature NAME KIND COUNT VALUE...         of the record above; NAME in hex

Bytes are hex digits, "-" if empty, or CRC32:LENGTH if long; floats are the eight digits of their
bits; int64 are decimal. In one place TensorFlow is not followed: it takes a cut inside the length
of a record for the end of the file.
"""
import base64
import json
import struct
import sys

CUT_THAT_TENSORFLOW_MISSES = 'truncated-in-header.tfrecord'


def hex_or_dash(data):
    return data.hex() or '-'


def bytes_value(text):
    if text.startswith('crc32:'):
        crc, length = text.split()
        return f'{crc[6:]}:{length[4:]}'
    return hex_or_dash(base64.b64decode(text))


def float_value(text):
    return struct.pack('>f', float(text)).hex()


def feature_line(name, lists):
    convert = {'bytes': bytes_value, 'float': float_value, 'int64': str}
    kind, values = next(iter(lists.items()), ('none', []))
    words = [convert[kind](value) for value in values]
    return ' '.join(['feature', hex_or_dash(name.encode()), kind, str(len(words))] + words)


def main():
    with open(sys.argv[1], encoding='utf-8') as file:
        manifest = json.load(file)
    for name, entry in sorted(manifest.items()):
        damaged = entry['tf_error'] is not None or name == CUT_THAT_TENSORFLOW_MISSES
        print('file', name, entry['compression'] or 'NONE', entry['records'], int(damaged))
        for crc, length, example in zip(entry['record_crc32'], entry['record_len'],
                                        entry['examples']):
            print('record', crc, length, int(example is not None))
            for key, lists in sorted((example or {}).items()):
                print(feature_line(key, lists))


if __name__ == '__main__':
    main()
