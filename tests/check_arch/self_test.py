#!/usr/bin/env python3
"""Is check.py right? Three checks, one line each, in the language of tests/run.sh.

    self_test.py DIR      from the top of the repository; DIR gets what is compiled

- planted.cu: every planted fault is found, and nothing else is complained of;
- occupancy: as CUDA's own cuda_occupancy.h finds it, over many CTA sizes;
- tensor-core instructions: as many as nvdisasm lists.
"""
import contextlib
import io
import itertools
import os
import re
import subprocess
import sys

import check
import cubin
import nvrtc
import occupancy

HERE = os.path.dirname(os.path.abspath(__file__))
PLANTED = os.path.join(HERE, 'planted.cu')
EXPECTED = {
    'planted_gemm is a GEMM without tensor-core instructions',
    'planted_local_array keeps N bytes of local memory',
    'planted_no_bounds has no __launch_bounds__',
    'planted_spill spills N bytes',
    "planted_untold doesn't tell its dynamic shared memory",
}
EXPECTED_OF_80 = EXPECTED | {
    'planted_gemm_late<bf16> is a GEMM without tensor-core instructions'}
NVDISASM = os.path.join(nvrtc.PACKAGES, 'cu13', 'bin', 'nvdisasm')


def verdict(name, complaint):
    print(f'FAIL check-arch: {name}: {complaint}' if complaint else f'ok check-arch: {name}')


def planted_faults_are_found(out, arch, expected):
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        check.report(arch, check.measure(PLANTED, arch, out))
    prefix = f'FAIL check-arch: sm_{arch}: '
    found = {re.sub(r'\d+ bytes', 'N bytes', line.removeprefix(prefix))
             for line in said.getvalue().splitlines() if line.startswith(prefix)}
    wrong = [f'missed: {what}' for what in sorted(expected - found)]
    wrong += [f'false alarm: {what}' for what in sorted(found - expected)]
    verdict(f'the faults planted for sm_{arch} are found', '; '.join(wrong))


def occupancy_is_cudas(out):
    """CTAs an SM over a grid of sizes, and at the edges of each shared-memory limit"""
    program = os.path.join(out, 'occupancy_test')
    source = os.path.join(HERE, 'occupancy_test.c')
    include = os.path.join(nvrtc.PACKAGES, 'cuda_runtime', 'include')
    name = "CTAs an SM are those of CUDA's cuda_occupancy.h"
    built = subprocess.run([os.environ.get('CC', 'cc'), '-I' + include, source, '-o', program],
                           capture_output=True, text=True, check=False)
    if built.returncode:
        print(f'SKIP check-arch: {name}: {check.first_error(built.stderr)}')
        return
    cases, questions = [], []
    for arch, limits in occupancy.ARCHITECTURES.items():
        edges = (0, 1, 8320, limits.shared_per_sm // 3, limits.shared_per_cta)
        for threads, registers, shared in itertools.product(
                (32, 64, 96, 128, 160, 256, 512, 1024), (8, 32, 33, 64, 80, 128, 168, 255), edges):
            cases.append((arch, threads, registers, shared))
            questions.append(f'{arch[:-1]} {arch[-1]} {limits.shared_per_sm} '
                             f'{limits.shared_per_cta} {limits.threads_per_sm} {limits.reserved} '
                             f'{threads} {registers} {shared}')
    answers = subprocess.run([program], input='\n'.join(questions), capture_output=True, text=True,
                             check=True).stdout.split()
    wrong = [f'sm_{case[0]} {case[1:]}: {occupancy.ctas_per_sm(*case)[0]}, not {answer}'
             for case, answer in zip(cases, answers)
             if occupancy.ctas_per_sm(*case)[0] != int(answer)]
    verdict(f'{name}: {len(cases)} cases', f'{len(wrong)} differ: {wrong[0]}' if wrong else '')


def tensor_instructions_are_nvdisasms(out, arch):
    name = f"sm_{arch}'s tensor-core instructions are those nvdisasm lists"
    if not os.path.exists(NVDISASM):
        print(f'SKIP check-arch: {name}: no nvdisasm')
        return
    path = os.path.join(out, f'sm_{arch}.cubin')
    listing = subprocess.run([NVDISASM, '-c', path], capture_output=True, text=True,
                             check=True).stdout
    listed = len(re.findall(r'^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?H[A-Z]*MMA', listing, re.M))
    with open(path, 'rb') as file:
        counted = sum(cubin.tensor_instructions(file.read()).values())
    verdict(name, f'counted {counted}, listed {listed}' if counted != listed or not listed else '')


def main():
    out = sys.argv[1]
    os.makedirs(out, exist_ok=True)
    for arch in ('70', '75', '80', '90'):
        planted_faults_are_found(out, arch, EXPECTED_OF_80 if arch == '80' else EXPECTED)
    occupancy_is_cudas(out)
    for arch in ('75', '80', '90'):
        tensor_instructions_are_nvdisasms(out, arch)


if __name__ == '__main__':
    main()
