#!/usr/bin/env python3
"""Makes tests/data/examples.txt: random and damaged messages, and what protobuf makes of them.

usage: make_examples_txt.py [COUNT [SEED]] > tests/data/examples.txt    (needs the package protobuf)

The judge is upb, the parser in C behind protobuf's Python package, given tf.Example's schema. The
text has one item a line, features as in fixtures.txt:

    message HEX VALID                        VALID 0: protobuf refuses it
    feature NAME KIND COUNT VALUE...         of the message above; NAN for a float that is none
"""
import random
import struct
import sys

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.internal import api_implementation
from google.protobuf.unknown_fields import UnknownFieldSet

FIELD = descriptor_pb2.FieldDescriptorProto
KINDS = (('bytes_list', 'BytesList', FIELD.TYPE_BYTES),
         ('float_list', 'FloatList', FIELD.TYPE_FLOAT),
         ('int64_list', 'Int64List', FIELD.TYPE_INT64))


def example_class():
    """tf.Example, built without TensorFlow."""
    file = descriptor_pb2.FileDescriptorProto(name='example.proto', package='t', syntax='proto3')

    def message(name):
        return file.message_type.add(name=name)

    feature = message('Feature')
    feature.oneof_decl.add(name='kind')
    for number, (field, name, value_type) in enumerate(KINDS, 1):
        message(name).field.add(name='value', number=1, type=value_type, label=FIELD.LABEL_REPEATED)
        feature.field.add(name=field, number=number, type=FIELD.TYPE_MESSAGE,
                          type_name='.t.' + name, label=FIELD.LABEL_OPTIONAL,
                          oneof_index=0)
    features = message('Features')
    entry = features.nested_type.add(name='FeatureEntry')
    entry.options.map_entry = True
    entry.field.add(name='key', number=1, type=FIELD.TYPE_STRING, label=FIELD.LABEL_OPTIONAL)
    entry.field.add(name='value', number=2, type=FIELD.TYPE_MESSAGE, type_name='.t.Feature',
                    label=FIELD.LABEL_OPTIONAL)
    features.field.add(name='feature', number=1, type=FIELD.TYPE_MESSAGE,
                       type_name='.t.Features.FeatureEntry', label=FIELD.LABEL_REPEATED)
    message('Example').field.add(name='features', number=1, type=FIELD.TYPE_MESSAGE,
                                 type_name='.t.Features', label=FIELD.LABEL_OPTIONAL)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName('t.Example'))


def varint(value):
    out = bytearray()
    value &= (1 << 64) - 1
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


class Maker:
    """Messages that are mostly right, with each liberty that the format allows, and some damage."""
    NAMES = (b'', b'a', b'b', b'label', 'é日'.encode(), b'\xf0\x9f\x98\x80', b'a\0')
    BAD_NAMES = (b'\xff', b'\xed\xa0\x80', b'\xc0\x80', b'\xe0\x80\x80', b'\xf4\x90\x80\x80',
                 b'\xc3', b'\xf0\x80\x80\x80', b'\xed\x9f\xbf', b'\xf4\x8f\xbf\xbf',
                 b'ab\x80', b'\xe2\x82')
    NUMBERS = (0, 1, 127, 128, 300, 1 << 31, (1 << 32) + 7, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)

    def __init__(self, seed):
        self.r = random.Random(seed)

    def some_bytes(self, low, high):
        return bytes(self.r.getrandbits(8) for _ in range(self.r.randint(low, high)))

    def number(self, value=None):
        """A varint, now and then longer than it must be."""
        r = self.r
        if value is None:
            value = r.choice(self.NUMBERS + (r.getrandbits(64),))
        out = varint(value)
        if r.random() < 0.1:
            last = r.choice((0, 0, 0, 1, 2, 0x7f))
            out = out[:-1] + bytes([out[-1] | 128]) + b'\x80' * r.randint(0, 9) + bytes([last])
        return out

    def tag(self, field, wire_type):
        return self.number(field << 3 | wire_type)

    def sized(self, field, content):
        return self.tag(field, 2) + self.number(len(content)) + content

    def unknown(self, depth=0):
        r = self.r
        field = r.choice((0, 1, 2, 3, 4, 5, 15, 16, 100, (1 << 29) - 1))
        wire_type = r.choice((0, 1, 2, 3, 5)) if r.random() < 0.97 else r.choice((4, 6, 7))
        if wire_type == 2:
            return self.sized(field, self.some_bytes(0, 5))
        if wire_type == 3 and r.random() < 0.03:
            depth = r.randint(94, 103)
            return self.tag(field, 3) * depth + varint(field << 3 | 4) * depth
        if wire_type == 3:
            inner = b''.join(self.unknown(depth + 1)
                             for _ in range(r.randint(0, 2) if depth < 4 else 0))
            return self.tag(field, 3) + inner + self.tag(field + (r.random() < 0.03), 4)
        values = {0: self.number, 1: lambda: self.some_bytes(8, 8),
                  5: lambda: self.some_bytes(4, 4)}
        return self.tag(field, wire_type) + values.get(wire_type, bytes)()

    def some(self, makers, low, high):
        return b''.join(self.unknown() if self.r.random() < 0.06 else self.r.choice(makers)()
                        for _ in range(self.r.randint(low, high)))

    def bytes_list(self):
        return self.some([lambda: self.sized(1, self.some_bytes(0, 6))], 0, 3)

    def float_list(self):
        r = self.r
        return self.some([lambda: self.tag(1, 5) + self.some_bytes(4, 4),
                          lambda: self.sized(1, b'\x40\x49\x0f\xdb' * r.randint(0, 3)
                                             + b'x' * (r.random() < 0.02))], 0, 3)

    def int64_list(self):
        def packed():
            return self.sized(1, b''.join(self.number() for _ in range(self.r.randint(0, 3))))
        return self.some([lambda: self.tag(1, 0) + self.number(), packed], 0, 3)

    def feature(self):
        return self.some([lambda: self.sized(1, self.bytes_list()),
                          lambda: self.sized(2, self.float_list()),
                          lambda: self.sized(3, self.int64_list())], 0, 2)

    def entry(self):
        names = self.NAMES if self.r.random() < 0.97 else self.BAD_NAMES
        return self.some([lambda: self.sized(1, self.r.choice(names)),
                          lambda: self.sized(2, self.feature())], 0, 3)

    def example(self):
        return self.some([lambda: self.sized(1, self.some([lambda: self.sized(1, self.entry())],
                                                          0, 4))], 0, 2)

    def damaged(self, message):
        r = self.r
        out = bytearray(message)
        for _ in range(r.choice((0, 1, 1, 2, 5))):
            if not out:
                break
            at = r.randrange(len(out))
            how = r.randrange(6)
            if how == 0:
                out[at] = r.getrandbits(8)
            elif how == 1:
                out[at] ^= 1 << r.randrange(8)
            elif how == 2:
                del out[at:at + r.randint(1, 4)]
            elif how == 3:
                out[at:at] = self.some_bytes(1, 3)
            elif how == 4:
                out[at:at] = out[at:at + r.randint(1, 20)]
            else:
                del out[at:]
        return bytes(out)


def float_word(value):
    return 'NAN' if value != value else struct.pack('>f', value).hex()


def feature_line(name, feature):
    kind = feature.WhichOneof('kind')
    values = list(getattr(feature, kind).value) if kind else []
    word = {None: str, 'bytes_list': lambda v: v.hex() or '-', 'float_list': float_word,
            'int64_list': str}[kind]
    kind = kind[:-len('_list')] if kind else 'none'
    return ' '.join(['feature', name.encode().hex() or '-', kind, str(len(values))]
                    + [word(value) for value in values])


def main():
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 3000
    maker = Maker(int(sys.argv[2]) if len(sys.argv) > 2 else 1)
    example = example_class()()
    if api_implementation.Type() != 'upb':
        sys.exit('the judge is upb; this protobuf is ' + api_implementation.Type())
    for i in range(count):
        message = maker.example() if i % 7 else maker.some_bytes(0, 12)
        if i % 3:
            message = maker.damaged(message)
        example.Clear()
        try:
            example.ParseFromString(message)
        except Exception:  # DecodeError, or UnicodeDecodeError for a name
            print('message', message.hex() or '-', 0)
            continue
        if any(field.field_number == 1 and field.wire_type == 2
               for field in UnknownFieldSet(example.features)):
            continue  # a map entry with a strange field: upb drops the entry, C++ and we the field
        print('message', message.hex() or '-', 1)
        for name in sorted(example.features.feature):
            print(feature_line(name, example.features.feature[name]))


if __name__ == '__main__':
    main()
