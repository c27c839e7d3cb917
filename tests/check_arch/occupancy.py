"""How many CTAs of a kernel one SM holds at a time, and which of its limits binds."""
from collections import namedtuple

KIB = 1024
WARP = 32
REGISTERS_PER_SM = 64 * KIB       # 32-bit ones, on every architecture here
SUB_PARTITIONS = 4                # of an SM; each has a quarter of the registers
REGISTER_GRANULE = 256            # registers are handed to warps in such pieces
MAX_STATIC_SHARED = 48 * KIB      # more must be dynamic and asked for

# Limits of one SM and of one CTA in bytes, threads and CTAs.  Source: CUDA C++ Programming Guide,
# "Technical Specifications per Compute Capability"; reserved and granule: cuda_occupancy.h of
# CUDA 12.9, with which the self-test compares what cta_limits finds.
Architecture = namedtuple(
    'Architecture', 'shared_per_sm shared_per_cta threads_per_sm ctas_per_sm reserved granule')
ARCHITECTURES = {
    '70': Architecture(96 * KIB, 96 * KIB, 2048, 32, 0, 256),
    '75': Architecture(64 * KIB, 64 * KIB, 1024, 16, 0, 256),
    '80': Architecture(164 * KIB, 163 * KIB, 2048, 32, KIB, 128),
    '86': Architecture(100 * KIB, 99 * KIB, 1536, 16, KIB, 128),
    '89': Architecture(100 * KIB, 99 * KIB, 1536, 24, KIB, 128),
    '90': Architecture(228 * KIB, 227 * KIB, 2048, 32, KIB, 128),
    '100': Architecture(228 * KIB, 227 * KIB, 2048, 32, KIB, 128),
    '120': Architecture(100 * KIB, 99 * KIB, 1536, 24, KIB, 128),
}


def architecture(name):
    """The limits of an architecture; a suffix such as that of 90a changes none."""
    return ARCHITECTURES[name.rstrip('af')]


def round_up(value, granule):
    return -(-value // granule) * granule


def cta_limits(arch, threads, registers, shared):
    """CTAs that one SM holds by each of its resources: {'regs': n, 'smem': n, 'threads': n}.

    shared counts static and dynamic bytes of a CTA. A CTA that can't run at all is held 0 times."""
    limits = architecture(arch)
    warps = -(-threads // WARP)
    per_warp = round_up(max(registers, 1) * WARP, REGISTER_GRANULE)
    warps_per_sm = REGISTERS_PER_SM // SUB_PARTITIONS // per_warp * SUB_PARTITIONS
    fits = shared <= limits.shared_per_cta
    shared_used = round_up(shared + limits.reserved, limits.granule)
    return {
        'regs': warps_per_sm // warps,
        'smem': limits.shared_per_sm // shared_used if shared_used and fits else
                limits.ctas_per_sm if fits else 0,
        'threads': min(limits.threads_per_sm // (warps * WARP), limits.ctas_per_sm),
    }


def ctas_per_sm(arch, threads, registers, shared):
    """(CTAs that one SM holds, the resource that binds: 'regs', 'smem' or 'threads')"""
    limits = cta_limits(arch, threads, registers, shared)
    binding = min(limits, key=limits.get)
    return limits[binding], binding
