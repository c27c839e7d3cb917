#!/usr/bin/env python3
"""What the kernels of a CUDA file take on each GPU architecture, and whether that is good enough.

    check.py [--out DIR] [--arch "70 80"] [--nvcc-log FILE] FILE.cu

Prints a table for each architecture, then "ok ..." or "FAIL ..." lines. A kernel fails
  - if it spills registers or keeps a local array in memory,
  - if it is a GEMM by its name (see GEMM_NAME) and uses no tensor-core instruction; those of BF16
    may have no body where tensor cores don't know it, which is before sm_80,
  - if it tells no CTA size (__launch_bounds__) or has dynamic shared memory and doesn't tell how
    much: MPTK_DYN_SMEM_BYTES(n) in its body leaves the comment "// dynamic shared memory: n" in the
    PTX. Without these two nobody can say how many CTAs an SM holds.
DIR gets the PTX, the cubins and kernels.json, the tables for other programs. The log, of
`nvcc -Xptxas -v`, tells of spills in what nvcc made, which may be another version of the compiler.
"""
import argparse
import concurrent.futures
import json
import os
import re
import shutil
import subprocess
import sys

import cubin
import nvrtc
import occupancy

# sm_70 is the reason for CUDA 12.9: CUDA 13 cannot compile for it.
DEFAULT_ARCHITECTURES = '70 75 80 86 89 90 100 120'
GEMM_NAME = re.compile(r'conv_gather|conv_wgrad|gemm', re.I)
NO_GEMM_NAME = re.compile(r'simt|reduce', re.I)
BF16_NAME = re.compile(r'bf16|bfloat16', re.I)
BF16_SINCE = 80
TELL_DYNAMIC = 'MPTK_DYN_SMEM_BYTES(n)=asm volatile("// dynamic shared memory: %0" :: "n"(n))'


# ---- what the tools say --------------------------------------------------------------------------

def entries(ptx):
    """(name, directives, body) of each kernel in a PTX text"""
    pattern = re.compile(r'^\.(?:visible|weak) \.entry (\w+)\(.*?^\)(.*?)^\{$(.*?)^\}$',
                         re.M | re.S)
    return pattern.findall(ptx)


def declared(ptx):
    """{kernel: {'threads': n, 'min_ctas': n, 'dynamic': bytes}}, None for what it doesn't tell"""
    outside = re.findall(r'^\.extern \.shared .*?(\w+)\[\];', ptx, re.M)
    told = {}
    for name, directives, body in entries(ptx):
        size = re.search(r'\.(?:max|req)ntid (\d+), (\d+), (\d+)', directives)
        ctas = re.search(r'\.minnctapersm (\d+)', directives)
        dynamic = re.search(r'// dynamic shared memory: (\d+)', body)
        uses = any(re.search(rf'\b{re.escape(symbol)}\b', body) for symbol in outside)
        told[name] = {
            'threads': int(size[1]) * int(size[2]) * int(size[3]) if size else None,
            'min_ctas': int(ctas[1]) if ctas else 1,
            'dynamic': int(dynamic[1]) if dynamic else None if uses else 0,
            'empty': not re.search(r'^\s+(?!ret;|\.|//)\S', body, re.M),
        }
    return told


def taken(listing):
    """{kernel: {'registers': n, 'static': bytes, 'stack': bytes, 'spilled': bytes}} of ptxas -v"""
    found, name = {}, None
    for line in listing.splitlines():
        if begin := re.search(r'Function properties for (\S+)', line):
            name = begin[1].strip("'")
        elif memory := re.search(r'(\d+) bytes stack frame, (\d+) bytes spill stores, '
                                 r'(\d+) bytes spill loads', line):
            found[name] = {'stack': int(memory[1]), 'spilled': int(memory[2]) + int(memory[3])}
        elif (registers := re.search(r'Used (\d+) registers', line)) and name in found:
            static = re.search(r'(\d+) bytes smem', line)
            found[name]['registers'] = int(registers[1])
            found[name]['static'] = int(static[1]) if static else 0
    return found


def demangle(names):
    """{mangled name: the name as the source has it, without its parameters}"""
    if not shutil.which('c++filt'):
        return {name: name for name in names}
    lines = subprocess.run(['c++filt'], input='\n'.join(names), capture_output=True, text=True,
                           check=True).stdout.splitlines()
    return {name: without_parameters(line) for name, line in zip(names, lines)}


def without_parameters(signature):
    """"void f<g(1), 2>(float*)" becomes "f<1, 2>": c++filt writes casts of constants as (type)1."""
    text = re.sub(r'\((?:unsigned )?(?:int|bool|long|short|char|[a-z_:]+)\)(?=-?\d)', '', signature)
    text = text.removeprefix('void ').replace('mptk::', '')
    text = text.replace('__half', 'half').replace('__nv_bfloat16', 'bf16')
    depth = 0
    for i, letter in enumerate(text):
        depth += (letter == '<') - (letter == '>')
        if letter == '(' and depth == 0:
            return text[:i]
    return text


# ---- one architecture ----------------------------------------------------------------------------

def measure(source, arch, out):
    """One record for each kernel of the file, ordered by name"""
    stem = os.path.join(out, f'sm_{arch}')
    ptx = nvrtc.ptx(source, arch, ['MPTK_CHECK_ARCH', TELL_DYNAMIC])
    with open(stem + '.ptx', 'w', encoding='utf-8') as file:
        file.write(ptx)
    listing = nvrtc.assemble(stem + '.ptx', arch, stem + '.cubin')
    with open(stem + '.cubin', 'rb') as file:
        tensor = cubin.tensor_instructions(file.read())
    told, used = declared(ptx), taken(listing)
    names = demangle(list(told))
    records = []
    for mangled, wish in told.items():
        record = {'arch': arch, 'name': names[mangled], **wish, **used[mangled],
                  'tensor': tensor[mangled]}
        record['ctas'], record['bound'] = resident_ctas(record)
        records.append(record)
    return sorted(records, key=lambda record: record['name'])


def resident_ctas(record):
    if record['threads'] is None or record['dynamic'] is None:
        return None, None
    return occupancy.ctas_per_sm(record['arch'], record['threads'], record['registers'],
                                 record['static'] + record['dynamic'])


def complaints(record):
    """What is wrong with one kernel"""
    found = []
    if record['spilled']:
        found.append(f"spills {record['spilled']} bytes")
    elif record['stack']:
        found.append(f"keeps {record['stack']} bytes of local memory")
    if is_gemm(record['name']) and not record['tensor'] and not may_be_empty(record):
        found.append('is a GEMM without tensor-core instructions')
    if record['threads'] is None:
        found.append('has no __launch_bounds__')
    if record['dynamic'] is None:
        found.append("doesn't tell its dynamic shared memory")
    return found


def may_be_empty(record):
    return (record['empty'] and bool(BF16_NAME.search(record['name'])) and
            int(record['arch'].rstrip('af')) < BF16_SINCE)


def is_gemm(name):
    return bool(GEMM_NAME.search(name)) and not NO_GEMM_NAME.search(name)


# ---- reporting -----------------------------------------------------------------------------------

def shown(value):
    return '?' if value is None else str(value)


def print_table(arch, records):
    """CTAs/SM: "2 of 3" where fewer fit than __launch_bounds__ asks for; then what binds them."""
    width = max(len(record['name']) for record in records)
    print(f'sm_{arch}')
    print(f'  {"kernel":{width}}  threads  regs  static+dynamic bytes  spilled  CTAs/SM  bound by'
          '  MMA')
    for r in records:
        shared = f"{r['static']} + {shown(r['dynamic'])}"
        ctas = shown(r['ctas'])
        if r['ctas'] is not None and r['ctas'] < r['min_ctas']:
            ctas += f" of {r['min_ctas']}"
        print(f"  {r['name']:{width}}  {shown(r['threads']):>7}  {r['registers']:>4}"
              f"  {shared:>20}  {r['spilled']:>7}  {ctas:>7}  {shown(r['bound']):>8}"
              f"  {r['tensor']:>3}")


def report(arch, records):
    """The lines of one architecture"""
    if not records:
        print(f'FAIL check-arch: sm_{arch}: no kernels')
        return
    print_table(arch, records)
    bad = [(record['name'], what) for record in records for what in complaints(record)]
    for name, what in bad:
        print(f'FAIL check-arch: sm_{arch}: {name} {what}')
    if not bad:
        gemms = sum(is_gemm(record['name']) and not may_be_empty(record) for record in records)
        print(f'ok check-arch: sm_{arch}: none of {len(records)} kernels spills, '
              f'all {gemms} GEMMs use tensor cores')


def report_nvcc(log):
    """Spills in what nvcc compiled, by architecture; its log names one with each kernel."""
    blocks = re.split(r"Compiling entry function '\S+' for 'sm_(\w+)'", log)[1:]
    for arch in sorted(set(blocks[::2]), key=lambda name: (len(name), name)):
        kernels = {name: used for block_arch, block in zip(blocks[::2], blocks[1::2])
                   if block_arch == arch for name, used in taken(block).items()}
        spilling = [name for name, used in kernels.items() if used['spilled'] or used['stack']]
        for mangled, name in demangle(spilling).items():
            print(f"FAIL check-arch: nvcc, sm_{arch}: {name} spills {kernels[mangled]['spilled']} "
                  f"bytes and has {kernels[mangled]['stack']} bytes of local memory")
        if not spilling:
            print(f'ok check-arch: nvcc, sm_{arch}: none of {len(kernels)} kernels spills')
    if not blocks:
        print('FAIL check-arch: nvcc: its log names no kernels')


def first_error(text):
    lines = [line for line in text.splitlines() if 'error' in line.lower()] or text.splitlines()
    return lines[0].strip()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('--out', default='build/check-arch')
    parser.add_argument('--arch', default=DEFAULT_ARCHITECTURES)
    parser.add_argument('--jobs', type=int, default=os.cpu_count())
    parser.add_argument('--nvcc-log')
    parser.add_argument('source')
    options = parser.parse_args()
    os.makedirs(options.out, exist_ok=True)
    archs, kernels = options.arch.split(), []
    with concurrent.futures.ProcessPoolExecutor(options.jobs) as pool:
        jobs = [pool.submit(measure, options.source, arch, options.out) for arch in archs]
        for arch, job in zip(archs, jobs):
            try:
                records = job.result()
            except nvrtc.CompileError as error:
                print(error)
                print(f'FAIL check-arch: sm_{arch}: does not compile: {first_error(str(error))}')
                continue
            report(arch, records)
            kernels += records
    with open(os.path.join(options.out, 'kernels.json'), 'w', encoding='utf-8') as file:
        json.dump(kernels, file, indent=1)
    if options.nvcc_log:
        with open(options.nvcc_log, encoding='utf-8') as file:
            report_nvcc(file.read())


if __name__ == '__main__':
    sys.exit(main())
