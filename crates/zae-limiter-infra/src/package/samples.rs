//! Executables for tests.

/// A small program that every Linux has.
pub(crate) fn program() -> Vec<u8> {
    std::fs::read("/bin/sh").expect("every Unix has a shell")
}

/// The same with a mark at its end.
pub(crate) fn marked(mark: &str) -> Vec<u8> {
    [&program()[..], mark.as_bytes()].concat()
}

/// The start of a macOS program for arm64.
pub(crate) fn mach_o() -> Vec<u8> {
    [&[0xcf, 0xfa, 0xed, 0xfe, 0x0c, 0, 0, 0x01][..], &[0; 56]].concat()
}

/// The start of a Windows program.
pub(crate) fn pe() -> Vec<u8> {
    [&b"MZ\x90\0"[..], &[0; 56], b"PE\0\0"].concat()
}
