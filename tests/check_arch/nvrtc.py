"""Compiles the device code of a CUDA file for one architecture with the CUDA 12.9 of a PyPI venv.

NVRTC makes PTX of the source, ptxas makes a cubin of that and tells what each kernel takes. NVRTC
sees no host code: it defines __CUDACC_RTC__, under which kernels.cu leaves its launchers out.
"""
import ctypes
import os
import subprocess
import sysconfig

PACKAGES = os.path.join(sysconfig.get_paths()['purelib'], 'nvidia')
LIBRARY = os.path.join(PACKAGES, 'cuda_nvrtc', 'lib', 'libnvrtc.so.12')
PTXAS = os.path.join(PACKAGES, 'cuda_nvcc', 'bin', 'ptxas')
INCLUDES = [os.path.join(PACKAGES, package, 'include')
            for package in ('cuda_runtime', 'cuda_cccl', 'cuda_nvcc')]

# NVRTC comes without a C library. These are what mptrain.h's declarations need.
HEADERS = {
    'stddef.h': '',  # size_t and NULL are built in
    'stdbool.h': '',
    'stdint.h': '\n'.join(f'typedef {kind} int{bits}_t; typedef unsigned {kind} uint{bits}_t;'
                          for kind, bits in (('char', 8), ('short', 16), ('int', 32),
                                             ('long', 64))).replace('typedef char',
                                                                    'typedef signed char'),
}


class CompileError(Exception):
    """What the compiler said, as one text."""


def _text(library, what, program):
    """The log, PTX or the like of a program: NVRTC's nvrtcGet<what>Size and nvrtcGet<what>"""
    size = ctypes.c_size_t()
    getattr(library, f'nvrtcGet{what}Size')(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    getattr(library, f'nvrtcGet{what}')(program, buffer)
    return buffer.value.decode(errors='replace')


def _strings(texts):
    """A C array of C strings"""
    return (ctypes.c_char_p * len(texts))(*[text.encode() for text in texts])


def ptx(source, arch, defines=()):
    """PTX of the file for compute_<arch>"""
    library = ctypes.CDLL(LIBRARY)
    includes = [os.path.dirname(source) or '.'] + INCLUDES
    # -default-device: mptrain.h's prototypes are not marked as the host's, which NVRTC refuses.
    options = [f'--gpu-architecture=compute_{arch}', '--std=c++17', '-default-device']
    options += [f'-I{path}' for path in includes] + [f'-D{define}' for define in defines]
    with open(source, 'rb') as file:
        text = file.read()
    program = ctypes.c_void_p()
    library.nvrtcCreateProgram(ctypes.byref(program), text, source.encode(),
                               len(HEADERS), _strings(list(HEADERS.values())),
                               _strings(list(HEADERS)))
    failed = library.nvrtcCompileProgram(program, len(options), _strings(options))
    result = _text(library, 'ProgramLog' if failed else 'PTX', program)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    if failed:
        raise CompileError(result or f'NVRTC error {failed}')
    return result


def assemble(ptx_file, arch, cubin_file):
    """Machine code of a PTX file; returns what ptxas -v says about its kernels."""
    done = subprocess.run([PTXAS, '-v', f'-arch=sm_{arch}', ptx_file, '-o', cubin_file],
                          capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompileError(done.stderr or f'ptxas ended with status {done.returncode}')
    return done.stdout + done.stderr
