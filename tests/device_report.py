#!/usr/bin/env python3
"""What tests/device_check.sh leaves to Python.

    device_report.py pictures DIR [N]     N small pictures (40) in four classes, below DIR
    device_report.py parity LOG LOG TOL   do two runs of train tell the same losses?
    device_report.py same LOG LOG         are their weights the same, to the bit?
    device_report.py report PARTS DIR     one JSON of the parts' table and the JSONs in DIR
"""
import json
import os
import struct
import sys

SIDE = 32


def write_bmp(path, rows):
    """rows: SIDE lists of SIDE (blue, green, red), from the bottom up"""
    size = 54 + 3 * SIDE * SIDE
    with open(path, 'wb') as file:
        file.write(struct.pack('<2sIIIIiiHHIIiiII', b'BM', size, 0, 54, 40, SIDE, SIDE, 1, 24, 0, 0,
                               0, 0, 0, 0))
        for row in rows:
            file.write(bytes(value for pixel in row for value in pixel))


def pictures(directory, count):
    """Which quarter of a picture is bright tells its class; the rest is a pattern of its number."""
    for number in range(count):
        label = number % 4
        os.makedirs(os.path.join(directory, str(label)), exist_ok=True)
        rows = [[tuple((200 if (y // 16) * 2 + x // 16 == label else 60) +
                       (number * 37 + x * 5 + y * 11 + c * 17) % 50 for c in range(3))
                 for x in range(SIDE)] for y in range(SIDE)]
        write_bmp(os.path.join(directory, str(label), f'{number}.bmp'), rows)


def events(log, kind):
    with open(log, encoding='utf-8') as file:
        lines = [json.loads(line) for line in file if line.startswith('{')]
    return [line for line in lines if line.get('event') == kind]


def parity(first, second, tolerance):
    losses = [[step['loss'] for step in events(log, 'step')] for log in (first, second)]
    pairs = list(zip(*losses))
    for one, other in pairs:
        print(f'{one:.6f} {other:.6f} {abs(one - other) / abs(one):.2e}')
    if not pairs or len(losses[0]) != len(losses[1]):
        sys.exit(f'{len(losses[0])} steps against {len(losses[1])}')
    worst = max(abs(one - other) / abs(one) for one, other in pairs)
    print(f'{len(pairs)} losses, at most {worst:.1e} apart')
    if not worst <= tolerance:
        sys.exit(f'more than {tolerance:g}')


def same(first, second):
    hashes = []
    for report in (first, second):
        with open(report, encoding='utf-8') as file:
            hashes.append(json.load(file)['weights_sha256'])
    print(*hashes)
    if hashes[0] != hashes[1]:
        sys.exit('other weights')


def report(table, directory):
    """table: lines "result TAB name TAB seconds TAB text"; first line: "commit TAB device" """
    with open(table, encoding='utf-8') as file:
        lines = [line.rstrip('\n').split('\t') for line in file]
    whole = {'commit': lines[0][0], 'device': lines[0][1], 'driver': lines[0][2], 'parts': []}
    for result, name, seconds, text in lines[1:]:
        whole['parts'].append({'name': name, 'result': result, 'seconds': int(seconds),
                               'text': text})
    for name in ('bench', 'torch'):
        path = os.path.join(directory, name + '.json')
        try:
            with open(path, encoding='utf-8') as file:
                whole[name] = json.load(file)
        except (OSError, ValueError):  # not run, or stopped half-way: the part above says so
            whole[name] = None
    json.dump(whole, sys.stdout, indent=1)
    print()


def main():
    command, *rest = sys.argv[1:]
    if command == 'pictures':
        pictures(rest[0], int(rest[1]) if len(rest) > 1 else 40)
    elif command == 'parity':
        parity(rest[0], rest[1], float(rest[2]))
    elif command == 'same':
        same(*rest)
    elif command == 'report':
        report(*rest)
    else:
        sys.exit(f'unknown command {command}')


if __name__ == '__main__':
    main()
