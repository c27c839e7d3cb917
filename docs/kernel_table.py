#!/usr/bin/env python3
"""Writes the tables of docs/kernels.md: per convolution of ResNet-50 the tile that kernels.cu
chooses, its occupancy, and what would bind it on three GPUs.

    docs/kernel_table.py             writes them into docs/kernels.md
    docs/kernel_table.py --check     exit 1 if they aren't what it would write
    docs/kernel_table.py --print     shows them

Tiles come from kernels.cu's own rule (kernel_plans.cpp runs it), registers and CTAs an SM from
`make check-arch`, which must have run. Times are of a cost model, not of a device:

    a step     a CTA tile times one slice of the depth: tensor cores, shared memory and L2 work side
               by side, each at its rate; the 3-norm of the three, as limits near each other add up
               (two equal ones cost 1.26 of one), but no less than the latency of a load
    a wave     the CTAs that fit on all SMs: its steps, then start and end
    a kernel   its waves, and beside them what travels to and from DRAM, each tensor once; 3-norm

What it is good for: the order of tiles, and which limit binds. It knows no L1, no clocks that sink
under load and no bank conflicts but the counted ones.
"""
import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections import namedtuple

TOP = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PAGE = os.path.join(TOP, 'docs', 'kernels.md')
KERNELS = os.path.join(TOP, 'build', 'check-arch', 'kernels.json')
BEGIN = '<!-- tables: begin; written by docs/kernel_table.py -->'
END = '<!-- tables: end -->'
BATCH_SIZE = 256

# sms; multiply-adds a clock and SM on tensor cores (FP16 operands, FP32 sums); GHz; bytes a clock
# and SM out of L2 when all SMs ask; GB/s of DRAM that a copy can reach (92 % of the specification);
# the share of the tensor rate that a loop of these instructions reaches at best. Sources: NVIDIA's
# white papers for Volta, Ampere, Hopper; L2 and the last column: published microbenchmarks.
Gpu = namedtuple('Gpu', 'name arch sms mac ghz l2 dram reach')
GPUS = [
    Gpu('V100', '70', 80, 512, 1.53, 17.6, 830, 0.95),
    Gpu('A100', '80', 108, 1024, 1.41, 40, 1800, 0.95),
    Gpu('H200', '90', 132, 2048, 1.755, 28, 4400, 0.62),  # mma.sync: wgmma alone reaches the rest
]

# Cycles of shared memory for a 16 x 16 fragment of A, of B, and for 16 bytes a lane stored by a
# warp. sm_70: counted on the addresses of its machine code, fprop by m8n8k4 on swizzled tiles, the
# others by wmma. ldmatrix: no conflicts.
SHARED_CYCLES = {('70', 'fprop'): (8, 8, 4), ('70', 'dgrad'): (16, 8, 8),
                 ('70', 'wgrad'): (8, 8, 8)}
LDMATRIX_CYCLES = (4, 4, 4)
SHARED_BYTES_A_CYCLE = 128

# Cycles that a step takes at least, and of a CTA's start and end: from a simulator of sm_70
LATENCY, START = 600, 1500
LAUNCH_US = 2

Tile = namedtuple('Tile', 'bm bn bk wm wn')
TILES = [Tile(256, 128, 32, 64, 64), Tile(128, 128, 32, 64, 64), Tile(256, 64, 32, 32, 64),
         Tile(128, 64, 32, 32, 64), Tile(64, 64, 64, 32, 32), Tile(64, 64, 32, 32, 32)]
Layer = namedtuple('Layer', 'name count hw c k r stride')
Plan = namedtuple('Plan', 'layer direction tile few_channels splits')
# The product a direction is: sizes, steps in the depth for a tile's bk, phases with CTAs of their
# own; flops that count, and bytes of its tensors.
Product = namedtuple('Product', 'rows columns depth steps phases flops bytes')


def ceil_div(a, b):
    return -(-a // b)


# ---- what kernels.cu does ------------------------------------------------------------------------

def chosen_plans():
    """Plans of all layers and directions, by kernels.cu's own rule"""
    runner = os.path.join(TOP, 'tests', 'cuda_on_cpu')
    with tempfile.TemporaryDirectory() as folder:
        program = os.path.join(folder, 'kernel_plans')
        subprocess.run([os.environ.get('CXX', 'g++'), '-std=c++17', '-mf16c',
                        '-fno-strict-aliasing', '-I' + TOP, '-I' + os.path.join(runner, 'include'),
                        '-include', os.path.join(runner, 'device.h'),
                        os.path.join(TOP, 'docs', 'kernel_plans.cpp'),
                        os.path.join(runner, 'runtime.cpp'), '-o', program], check=True)
        lines = subprocess.run([program, str(BATCH_SIZE)], capture_output=True, text=True,
                               check=True).stdout.splitlines()
    return [parse_plan(line.split('|')) for line in lines]


def parse_plan(words):
    name, direction = words[0], words[7]
    count, hw, c, k, r, stride = map(int, words[1:7])
    bm, bn, bk, few_channels, splits = map(int, words[8:])
    tile = next(tile for tile in TILES if tile[:3] == (bm, bn, bk))
    layer = Layer(name, count, hw, c, k, r, stride)
    return Plan(layer, direction, tile, bool(few_channels), splits)


def occupancies():
    """{(arch, kernel name): record of tests/check_arch}"""
    with open(KERNELS, encoding='utf-8') as file:
        return {(record['arch'], record['name']): record for record in json.load(file)}


def kernel_name(direction, tile, few_channels, flat):
    shape = ', '.join(map(str, tile))
    if direction == 'wgrad':
        return f'mptk_conv_wgrad_kernel<half, tile<{shape}', str(flat).lower()
    return (f'mptk_conv_gather_kernel<half, tile<{shape}',
            f"{str(direction == 'dgrad').lower()}, {str(few_channels).lower()}")


def record_of(kernels, arch, direction, tile, few_channels=False, flat=False):
    """The record of one kernel; None: there is no such kernel"""
    begin, end = kernel_name(direction, tile, few_channels, flat)
    for (kernel_arch, name), record in kernels.items():
        if kernel_arch == arch and name.startswith(begin) and name.endswith(end + '>'):
            return record
    return None


# ---- the model -----------------------------------------------------------------------------------

def product_of(layer, direction, tile):
    """Of one direction; bytes count each tensor once, FP16, and FP32 gradients of weights."""
    out = layer.hw // layer.stride
    pixels, taps = BATCH_SIZE * out * out, layer.r * layer.r
    c8 = ceil_div(layer.c, 8) * 8  # channels are padded to 8
    x, y, w = BATCH_SIZE * layer.hw ** 2 * layer.c, pixels * layer.k, layer.k * taps * layer.c
    flops = 2 * pixels * layer.k * taps * layer.c
    skipped = layer.stride ** 2 if layer.r == 1 else 1  # pixels that a strided 1x1 doesn't read
    if direction == 'fprop':
        steps = ceil_div(taps * c8, tile.bk) if c8 < tile.bk else taps * ceil_div(c8, tile.bk)
        return Product(pixels, layer.k, taps * c8, steps, 1, flops, 2 * (x // skipped + y + w))
    if direction == 'dgrad':
        phases = layer.stride ** 2
        steps = taps * ceil_div(layer.k, tile.bk) / phases
        return Product(BATCH_SIZE * layer.hw ** 2 // phases, layer.c, taps * layer.k / phases,
                       steps, phases, flops, 2 * (x + y + w))
    return Product(layer.k, taps * c8, pixels, ceil_div(pixels, tile.bk), 1, flops,
                   2 * (x // skipped + y) + 4 * w)


def norm3(*values):
    return sum(value ** 3 for value in values) ** (1 / 3)


def step_cycles(gpu, direction, tile):
    """(tensor cores, shared memory, L2): cycles of an SM for one step of one CTA"""
    a, b, store = SHARED_CYCLES.get((gpu.arch, direction), LDMATRIX_CYCLES)
    warps = (tile.bm // tile.wm) * (tile.bn // tile.wn)
    operand_bytes = (tile.bm + tile.bn) * tile.bk * 2
    loads = warps * (tile.wm * a + tile.wn * b) / 16 * tile.bk / 16
    stores = operand_bytes / (4 * SHARED_BYTES_A_CYCLE) * store
    return (tile.bm * tile.bn * tile.bk / gpu.mac / gpu.reach, loads + stores,
            operand_bytes / gpu.l2)


def kernel_time(gpu, direction, tile, resident, product, splits):
    """(microseconds, the limit that binds) for `resident` CTAs an SM"""
    ctas = (ceil_div(product.rows, tile.bm) * ceil_div(product.columns, tile.bn) * product.phases *
            splits)
    steps = math.ceil(product.steps / splits) if splits > 1 else product.steps
    cycles = step_cycles(gpu, direction, tile)
    step = norm3(*cycles)
    ends = START + tile.bm * tile.bn * (4 if direction == 'wgrad' else 2) / 12
    waves, rest = divmod(ctas, gpu.sms * resident)
    clocks = waves * (steps * max(step * resident, LATENCY) + ends * resident / 2)
    if rest:
        clocks += steps * max(step * ceil_div(rest, gpu.sms), LATENCY) + ends
    compute = clocks / gpu.ghz / 1e3 + LAUNCH_US
    partial_bytes = product.rows * product.columns * 4 * splits if splits > 1 else 0
    dram = (product.bytes + partial_bytes) / gpu.dram / 1e3
    add_splits = LAUNCH_US + partial_bytes / gpu.dram / 1e3 if splits > 1 else 0
    limits = dict(zip(('tensor', 'smem', 'L2'), cycles))
    bound = 'DRAM' if dram > compute else max(limits, key=limits.get)
    return norm3(compute, dram) + add_splits, bound


def roofline(gpu, product):
    """(microseconds, 'tensor' or 'DRAM'): no kernel on this GPU can be faster"""
    tensor = product.flops / (gpu.sms * gpu.mac * gpu.ghz * 2e3)
    dram = product.bytes / gpu.dram / 1e3
    return max(tensor, dram), 'tensor' if tensor > dram else 'DRAM'


def is_flat(plan):
    return plan.layer.r == 1 and plan.layer.stride == 1


def tile_time(kernels, gpu, plan, tile):
    """(microseconds, the limit that binds) with this tile; None where kernels.cu has no such one"""
    record = record_of(kernels, gpu.arch, plan.direction, tile, plan.few_channels, is_flat(plan))
    if not record or not record['ctas']:
        return None
    product = product_of(plan.layer, plan.direction, tile)
    return kernel_time(gpu, plan.direction, tile, record['ctas'], product, max(plan.splits, 1))


def best_time(kernels, gpu, plan):
    """With the tile that the model likes best, of those that kernels.cu has"""
    times = [tile_time(kernels, gpu, plan, tile) for tile in TILES]
    return min(time[0] for time in times if time)


# ---- the tables ----------------------------------------------------------------------------------

def tile_text(plan):
    text = f'{plan.tile.bm}x{plan.tile.bn}' + ('x64' if plan.tile.bk == 64 else '')
    if plan.few_channels:
        text += ' few'
    return f'{text} / {plan.splits}' if plan.direction == 'wgrad' else text


def by_layer(plans):
    """[(layer, {direction: plan})] in the order of the network"""
    layers = {}
    for plan in plans:
        layers.setdefault(plan.layer, {})[plan.direction] = plan
    return list(layers.items())


def layer_table(plans):
    lines = ['| layer | x | GFLOP | fprop | dgrad | wgrad / splits | FLOP/byte |',
             '|---|--:|--:|---|---|---|--:|']
    for layer, found in by_layer(plans):
        products = [product_of(layer, direction, plan.tile) for direction, plan in found.items()]
        intensity = min(product.flops / product.bytes for product in products)
        tiles = [tile_text(found[direction]) if direction in found else 'none'
                 for direction in ('fprop', 'dgrad', 'wgrad')]
        lines.append(f'| {layer.name} | {layer.count} | {products[0].flops / 1e9:.1f} | '
                     + ' | '.join(tiles) + f' | {intensity:.0f} |')
    return lines


def occupancy_table(kernels, plans):
    used = {}
    for plan in plans:
        flat = plan.direction == 'wgrad' and is_flat(plan)
        used[(plan.direction, plan.tile, plan.few_channels, flat)] = None
    lines = ['| kernel | threads | ' + ' | '.join(f'sm_{gpu.arch}' for gpu in GPUS) + ' |',
             '|---|--:|' + '---|' * len(GPUS)]
    for direction, tile, few_channels, flat in sorted(used):
        records = [record_of(kernels, gpu.arch, direction, tile, few_channels, flat)
                   for gpu in GPUS]
        cells = [f"{r['registers']} regs, {(r['static'] + r['dynamic']) / 1024:.0f} KB: "
                 f"{r['ctas']} CTA{'s' if r['ctas'] > 1 else ''} ({r['bound']})" for r in records]
        name = f'{direction} {tile.bm}x{tile.bn}x{tile.bk}'
        name += ' few channels' if few_channels else ' 1x1' if flat else ''
        lines.append(f"| {name} | {records[0]['threads']} | " + ' | '.join(cells) + ' |')
    return lines


def gpu_table(kernels, plans, gpu):
    lines = [f'| {gpu.name}: layer | x | fprop | dgrad | wgrad | share |',
             '|---|--:|---|---|---|--:|']
    times = {plan: (*tile_time(kernels, gpu, plan, plan.tile),
                    *roofline(gpu, product_of(plan.layer, plan.direction, plan.tile)))
             for plan in plans}
    whole = sum(plan.layer.count * times[plan][0] for plan in plans)
    for layer, found in by_layer(plans):
        cells = []
        for direction in ('fprop', 'dgrad', 'wgrad'):
            if direction not in found:
                cells.append('none')
                continue
            us, bound, roof, roof_bound = times[found[direction]]
            cells.append(f'{us:.0f} {bound} ({roof:.0f} {roof_bound})')
        share = layer.count * sum(times[plan][0] for plan in found.values()) / whole
        lines.append(f'| {layer.name} | {layer.count} | ' + ' | '.join(cells) +
                     f' | {100 * share:.1f} % |')
    sums = []
    for direction in ('fprop', 'dgrad', 'wgrad'):
        chosen = [plan for plan in plans if plan.direction == direction]
        sums.append(f'{sum(p.layer.count * times[p][0] for p in chosen) / 1e3:.1f} '
                    f'({sum(p.layer.count * times[p][2] for p in chosen) / 1e3:.1f})')
    lines.append(f'| sum, ms | {sum(layer.count for layer, _ in by_layer(plans))} | '
                 + ' | '.join(sums) + ' | |')
    best = sum(plan.layer.count * best_time(kernels, gpu, plan) for plan in plans)
    lines += ['', 'With the tile that the model likes best for each, instead of the one that '
              f"kernels.cu's rule takes, the sum would be {100 * (1 - best / whole):.1f} % less."]
    return lines


def tables():
    plans, kernels = chosen_plans(), occupancies()
    lines = [f'### Tiles and arithmetic intensity, batch {BATCH_SIZE}', ''] + layer_table(plans)
    lines += ['', '### Occupancy', ''] + occupancy_table(kernels, plans)
    for gpu in GPUS:
        lines += ['', f'### {gpu.name}: microseconds by the model (and by the roofline)', '']
        lines += gpu_table(kernels, plans, gpu)
    return '\n'.join(lines)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('--check', action='store_true')
    parser.add_argument('--print', action='store_true')
    options = parser.parse_args()
    if not os.path.exists(KERNELS):
        sys.exit('docs/kernel_table.py: run `make check-arch` first')
    text = tables()
    if options.print:
        print(text)
        return
    with open(PAGE, encoding='utf-8') as file:
        old = file.read()
    before, _, rest = old.partition(BEGIN)
    new = before + BEGIN + '\n\n' + text + '\n\n' + END + rest.partition(END)[2]
    if not options.check:
        with open(PAGE, 'w', encoding='utf-8') as file:
            file.write(new)
    elif new != old:
        sys.exit('docs/kernels.md: its tables are old: run docs/kernel_table.py')


if __name__ == '__main__':
    main()
