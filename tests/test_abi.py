"""nccl_abi.h against NCCL's own headers, and against what repeats parts of it in other languages."""

import re
import subprocess

import pytest

from helpers import abi, nccl_libs
from helpers.build import ABI_HEADER, ROOT, build_program, build_shared
from helpers.cheader import Header
from pynccl import DataType, ReduceOp, Result

# What NCCL's header includes of CUDA's, as far as it uses it.
CUDA = {
    "cuda_runtime.h": (
        "#include <stddef.h>\n"
        "#define CUDART_VERSION 12000\n"
        "typedef struct CUstream_st *cudaStream_t;\n"
        "typedef struct CUevent_st *cudaEvent_t;\n"
    ),
    "cuda_fp16.h": "",
    "cuda_fp8.h": "",
    "cuda_bf16.h": "#define __CUDA_BF16_TYPES_EXIST__ 1\n",
}
INITIALIZED = {
    "NCCL_CONFIG_INITIALIZER": "ncclConfig_t",
    "NCCL_COLLCONFIG_INITIALIZER": "ncclCollConfig_t",
    "NCCL_SIM_INFO_INITIALIZER": "ncclSimInfo_t",
    "NCCL_ENCRYPTION_CONFIG_INITIALIZER": "ncclEncryptionConfig_t",
}
# They say how many there are, or which release it is: these grow.
GROWING = {
    "ncclNumResults", "ncclNumTypes",
    "NCCL_MAJOR", "NCCL_MINOR", "NCCL_PATCH", "NCCL_VERSION_CODE",
}  # fmt: skip


@pytest.fixture(scope="module")
def ours():
    return Header.read(ABI_HEADER)


def printer(names):
    """Write a program that prints the value, size or place of everything that a header declares."""
    lines = []
    for constant in sorted(names.enumerators):
        lines.append(f'printf("{constant} %lld\\n", (long long){constant});')
    for constant in sorted(names.constants):
        lines.append(f'printf("{constant} %.17g\\n", (double)_Generic(({constant}), void *: 0, '
                     f'default: {constant}));')  # fmt: skip
    for enum in sorted(names.enums):
        lines.append(f'printf("{enum} %zu signed %d\\n", sizeof({enum}), ({enum})-1 < 0);')
    for struct, fields in sorted(names.structs.items()):
        lines.append(f'printf("{struct} %zu %zu\\n", sizeof({struct}), _Alignof({struct}));')
        for member in fields:
            lines.append(
                f'printf("{struct}.{member} %zu %zu\\n", offsetof({struct}, {member}), '
                f"sizeof((({struct} *)0)->{member}));"
            )
    for macro in sorted(names.initializers):
        # Static, so that padding is zero.
        lines.append(f"{{ static {INITIALIZED[macro]} it = {macro};")
        lines.append(f'  dump("{macro}", &it, sizeof it); }}')
    body = "\n    ".join(lines)
    return f"""
#include HEADER
#include <stddef.h>
#include <stdio.h>
void dump(const char *name, const void *at, size_t n);
void dump(const char *name, const void *at, size_t n) {{
    printf("%s ", name);
    for (size_t i = 0; i < n; i++)
        printf("%02x", ((const unsigned char *)at)[i]);
    printf("\\n");
}}
int main(void) {{
    {body}
    return 0;
}}
"""


def measure(names, header, tmp_path):
    """Compile the printer with a header and return what it prints: {name: rest of the line}."""
    source = tmp_path / "printer.c"
    source.write_text(printer(names))
    program = build_program(
        "printer",
        [source],
        {"HEADER": f'"{header}"', "NCCL_OS_LINUX": 1},
        options=["-Wno-pedantic", "-Wno-type-limits"],
        generated=CUDA,
    )
    text = subprocess.run([program], capture_output=True, text=True, check=True, timeout=20).stdout
    return dict(line.split(" ", 1) for line in text.splitlines())


# ---- NCCL's header ------------------------------------------------------------------------------------


def test_every_name_size_place_and_value_is_nccls(ours, tmp_path):
    header = nccl_libs.get(nccl_libs.CURRENT).header
    real = Header.read(header)
    assert len(real.structs["ncclConfig_t"]) == 26, "the reader of headers must see them all"
    assert real.enumerators == ours.enumerators
    assert real.enums == ours.enums
    assert real.constants == ours.constants
    assert real.structs == ours.structs
    assert real.initializers == ours.initializers == set(INITIALIZED)
    measured = measure(ours, ABI_HEADER, tmp_path)
    assert measured["ncclConfig_t"] == "120 8"
    assert measured == measure(real, header, tmp_path)


def test_every_function_has_nccls_type(tmp_path):
    real = nccl_libs.get(nccl_libs.CURRENT)
    symbols = abi.nccl_symbols()
    assert {symbol.name for symbol in symbols} == Header.read(real.header).functions
    assert len(symbols) == 73
    compare_types(real, symbols, tmp_path)


@pytest.mark.parametrize("version", nccl_libs.VERSIONS[:-1])
def test_older_headers_are_a_part_of_it(version, ours, tmp_path):
    """Structs were only ever appended to: declarations of 2.32 serve older libraries too."""
    real = nccl_libs.get(version)
    old = Header.read(real.header)
    old.initializers.clear()
    measured, mine = measure(old, real.header, tmp_path), measure(ours, ABI_HEADER, tmp_path)
    for name, value in measured.items():
        if name not in GROWING and name not in old.structs:
            assert mine.get(name) == value, name
    for struct, fields in old.structs.items():
        assert ours.structs[struct][: len(fields)] == fields
        assert int(mine[struct].split()[0]) >= int(measured[struct].split()[0])
    symbols = [symbol for symbol in abi.nccl_symbols() if symbol.version <= real.code]
    assert {symbol.name for symbol in symbols} == old.functions
    compare_types(real, symbols, tmp_path)


def compare_types(real, symbols, tmp_path):
    """Let the compiler compare our prototypes with the declarations in NCCL's header."""
    lines = [f'#include "{real.header}"', "typedef const char *pynccl_text_t;"]
    for symbol in symbols:
        params = ", ".join(param.type for param in symbol.params) or "void"
        # With a prototype: an empty list in NCCL's header would be compatible with anything.
        lines.append(
            f"_Static_assert(__builtin_types_compatible_p({symbol.ret} ({params}), "
            f'__typeof__({symbol.name})), "{symbol.name}");'
        )
    source = tmp_path / "types.c"
    source.write_text("\n".join(lines) + "\n")
    build_shared(
        "libtypes.so",
        [source],
        {"NCCL_OS_LINUX": 1},
        options=["-Wno-deprecated-declarations", "-Wno-pedantic"],
        generated=CUDA,
    )


def test_the_comparison_sees_a_wrong_type(tmp_path):
    real = nccl_libs.get(nccl_libs.CURRENT)
    (good,) = (symbol for symbol in abi.nccl_symbols() if symbol.name == "ncclSend")
    wrong = abi.Symbol(
        good.ret,
        good.name,
        good.version,
        (*good.params[:1], abi.Param("int", "count"), *good.params[2:]),
    )
    with pytest.raises(RuntimeError, match="ncclSend"):
        compare_types(real, [wrong], tmp_path)


def test_both_headers_can_be_included(tmp_path):
    header = nccl_libs.get(nccl_libs.CURRENT).header
    source = tmp_path / "both.c"
    source.write_text(
        f'#include "{header}"\n#include "{ABI_HEADER}"\n'
        "#define COUNT(ret, name, version, args) +1\n"
        '_Static_assert(0 NCCL_SYMBOLS(COUNT) == 73, "");\n'
        "static ncclConfig_t config = NCCL_CONFIG_INITIALIZER;\n"
        "ncclConfig_t *get(void);\nncclConfig_t *get(void) { return &config; }\n"
    )
    build_shared(
        "libboth.so",
        [source],
        options=["-Wno-pedantic"],
        generated=CUDA,
    )


# ---- what needs no NCCL ---------------------------------------------------------------------------------


def test_the_header_stands_alone(tmp_path):
    """It is strict C11 and includes libc only."""
    source = tmp_path / "alone.c"
    source.write_text(f'#include "{ABI_HEADER}"\nint alone;\n')
    build_shared("libalone.so", [source], options=["-std=c11", "-pedantic-errors"])
    includes = re.findall(r"#include\s+(\S+)", ABI_HEADER.read_text())
    assert includes == ["<limits.h>", "<stddef.h>", "<stdint.h>"]


def test_layout_on_this_platform(ours, tmp_path):
    """The numbers that NCCL's binaries are built with, for machines that have no NCCL to compare with."""
    measured = measure(ours, ABI_HEADER, tmp_path)
    places = {
        "blocking": 16, "netName": 32, "trafficClass": 44, "commName": 48, "nvlsCTAs": 68,
        "numRmaCtx": 84, "graphStreamOrdering": 92, "hostCftMode": 108, "nvlsHostMode": 112,
    }  # fmt: skip
    for name, place in places.items():
        assert measured[f"ncclConfig_t.{name}"].split()[0] == str(place)
    sizes = {"ncclUniqueId": 128, "ncclConfig_t": 120, "ncclCollConfig_t": 72, "ncclSimInfo_t": 24}
    assert {name: int(measured[name].split()[0]) for name in sizes} == sizes


def test_enumerations_of_the_binding(ours, tmp_path):
    measured = measure(ours, ABI_HEADER, tmp_path)

    def value(name):
        return int(measured[name])

    for op in ReduceOp:
        assert value(f"nccl{op.name.capitalize()}") == op
    assert len(ReduceOp) == value("ncclNumOps")
    for result in Result:
        name = "".join(part.capitalize() for part in result.name.split("_"))
        assert value(f"nccl{name}") == result
    assert len(Result) == value("ncclNumResults")
    rows = dtype_rows()
    assert [name for name, *_ in rows] == [dtype.name for dtype in DataType]
    assert len(rows) == value("ncclNumTypes")
    for name, code, nbytes, pyname in rows:
        assert value(code) == DataType[name]
        assert int(nbytes) == DataType[name].itemsize
        assert pyname == name.lower()


def dtype_rows():
    """Return the rows of NCCL_DTYPES."""
    text = ABI_HEADER.read_text()
    body = text[text.index("#define NCCL_DTYPES(X)") :].split("\n\n")[0]
    return re.findall(r'X\((\w+), (\w+), (\d+), "(\w+)"\)', body)


def test_versions_never_decrease_within_what_needs_them():
    """A plausible code for each: 2.x as major * 10000 + minor * 100, no patch level."""
    for symbol in abi.nccl_symbols():
        assert symbol.version % 100 == 0
        assert 21000 <= symbol.version <= 23200


def test_the_magic_of_host_ids():
    text = ABI_HEADER.read_text()
    (magic,) = re.findall(r'#define PYNCCL_HOST_ID_MAGIC "(.*)"', text)
    assert len(magic) == 32
    assert "#define PYNCCL_HOST_ID_MAGIC_BYTES 32" in text
    assert "#define PYNCCL_HOST_ID_OFFSET 96" in text


# ---- _nccl.pxd --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pxd():
    return (ROOT / "pynccl" / "_nccl.pxd").read_text()


def pxd_functions(text):
    """Return {name: (return type, parameter types, qualifiers)} of the pointers in ``struct nccl_api``."""
    body = text[text.index("struct nccl_api:") :]
    body = body[: body.index("int version")]
    rows = re.findall(
        r"([\w \*]+?)\s*\(\*(\w+)\)\(((?:[^()]|\([^()]*\))*)\)((?: \w+)*)\s*(?=\n)", body
    )
    rows += re.findall(r"(void) \(\*(pyncclHostSetInterrupt)\)\((.*)\)( noexcept nogil)\n", body)
    return {
        name: (ret.strip(), re.sub(r" noexcept| nogil", "", " ".join(args.split())), rest.split())
        for ret, name, args, rest in rows
    }


def test_the_binding_declares_every_function(pxd):
    functions = pxd_functions(pxd)
    assert set(functions) == {s.name for s in abi.nccl_symbols() + abi.host_symbols()}
    for name, (_, _, qualifiers) in functions.items():
        assert qualifiers == ["noexcept", "nogil"], name


def test_the_bindings_prototypes_are_the_headers(pxd, tmp_path):
    """Compiled as C, they must be the types of the loader's table."""
    lines = ['#include "_loader.h"', "#define FIELD(s, f) __typeof__(((s *)0)->f)"]
    for name, (ret, args, _) in pxd_functions(pxd).items():
        lines.append(
            f"_Static_assert(__builtin_types_compatible_p({ret} (*)({args or 'void'}), "
            f'FIELD(struct nccl_api, {name})), "{name}");'
        )
    fields = pxd_fields(pxd)
    assert set(fields) >= set(INITIALIZED.values())
    for struct, members in fields.items():
        for type_, member in members:
            lines.append(
                f"_Static_assert(__builtin_types_compatible_p({type_}, FIELD({struct}, {member})), "
                f'"{struct}.{member}");'
            )
    source = tmp_path / "pxd.c"
    source.write_text("\n".join(lines) + "\n")
    build_shared("libpxd.so", [source], options=["-Wno-pedantic"])


def pxd_fields(text):
    """Return {struct: [(type, field)]} of the structs that the .pxd declares."""
    out = {}
    for name, body in re.findall(r"ctypedef struct (nccl\w+):\n((?: {8}.*\n)+)", text):
        rows = [re.match(r"(.*?)(\w+)(\[\d+\])?$", line.strip()) for line in body.splitlines()]
        members = [(row[1].strip() + (row[3] or ""), row[2]) for row in rows if row]
        if members != [("", "pass")]:
            out[name] = members
    return out


def test_the_binding_knows_every_field(pxd, ours):
    """A config field that the .pxd leaves out could not be set from Python."""
    fields = pxd_fields(pxd)
    for struct in (
        "ncclConfig_t",
        "ncclSimInfo_t",
        "ncclEncryptionConfig_t",
        "ncclWaitSignalDesc_t",
    ):
        assert [member for _, member in fields[struct]] == ours.structs[struct]
