"""Reads the machine code of a cubin: which kernels it has, and how many tensor-core instructions.

A cubin is an ELF file; kernel f has its code in the section ".text.f". From sm_70 on every
instruction has 16 bytes, and the lowest 12 bits of the first 8 are its opcode. The opcodes below
are undocumented: they were read off nvdisasm's listings (for sm_70 that of CUDA 12), and the
self-test compares the counts with nvdisasm's (from sm_75 on; PyPI's know no sm_70).
"""
import struct

INSTRUCTION_BYTES = 16
TENSOR_OPCODES = {
    0x236: 'HMMA.884',    # sm_70: a quarter of an m8n8k4
    0x23c: 'HMMA',        # sm_75 on: 1688, 16816
    0x9f0: 'HGMMA',       # sm_90a: wgmma, both operands in shared memory
    0xdf0: 'HGMMA',       # sm_90a: wgmma, A in registers
}


def sections(elf):
    """(name, content) of each section of a 64-bit little-endian ELF file"""
    if elf[:6] != b'\x7fELF\x02\x01':
        raise ValueError('no 64-bit ELF file')
    table, = struct.unpack_from('<Q', elf, 0x28)
    entry_size, count, names = struct.unpack_from('<HHH', elf, 0x3a)
    headers = [struct.unpack_from('<IIQQQQ', elf, table + i * entry_size) for i in range(count)]
    name_table = headers[names][4]
    for name, kind, _, _, offset, size in headers:
        begin = name_table + name
        text = elf[begin:elf.index(b'\0', begin)].decode()
        occupies_file = kind != 8  # SHT_NOBITS, as shared memory has
        yield text, elf[offset:offset + size] if occupies_file else b''


def tensor_instructions(elf):
    """{kernel: number of tensor-core instructions in its code}"""
    counts = {}
    for name, code in sections(elf):
        if name.startswith('.text.'):
            words = struct.unpack(f'<{len(code) // 8}Q', code)[::INSTRUCTION_BYTES // 8]
            counts[name[len('.text.'):]] = sum(w & 0xfff in TENSOR_OPCODES for w in words)
    return counts
