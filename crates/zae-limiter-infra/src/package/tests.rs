use super::samples::{mach_o, marked, pe, program as a_program};
use super::*;
use crate::release::RELEASE_MARK;

fn here() -> Architecture {
    if cfg!(target_arch = "aarch64") { Architecture::Arm64 } else { Architecture::X86_64 }
}

fn another() -> Architecture {
    match here() {
        Architecture::X86_64 => Architecture::Arm64,
        Architecture::Arm64 => Architecture::X86_64,
    }
}

#[test]
fn a_program_is_packed_as_an_executable_bootstrap() {
    let program = a_program();
    let package = Package::of(&program, None).unwrap();
    let mut zip = ZipArchive::new(Cursor::new(package.zip())).unwrap();
    assert_eq!(zip.len(), 1);
    let mut file = zip.by_name("bootstrap").unwrap();
    assert_eq!(file.unix_mode().unwrap() & 0o777, 0o755);
    let mut unpacked = Vec::new();
    file.read_to_end(&mut unpacked).unwrap();
    assert_eq!(unpacked, program);
    assert!(package.zip().len() < program.len());
}

#[test]
fn the_same_program_packs_to_the_same_bytes_and_another_to_another_key() {
    let mut program = a_program();
    let package = Package::of(&program, None).unwrap();
    let again = Package::of(&program, None).unwrap();
    assert_eq!((again.zip(), again.key()), (package.zip(), package.key()));
    program.push(0);
    assert_ne!(Package::of(&program, None).unwrap().key(), package.key());
}

#[test]
fn a_zip_file_of_a_release_counts_as_the_program_in_it() {
    let package = Package::of(&a_program(), None).unwrap();
    let again = Package::of(package.zip(), Some(here())).unwrap();
    assert_eq!((again.zip(), again.key()), (package.zip(), package.key()));
    let error = Package::of(package.zip(), Some(another())).expect_err("another processor");
    assert_eq!(error, PackageError::Architecture { found: here(), wanted: another() });
    let half = &package.zip()[..package.zip().len() / 2];
    assert!(matches!(Package::of(half, None), Err(PackageError::Garbled(_))));
}

#[test]
fn a_zip_file_without_a_bootstrap_is_rejected() {
    let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
    zip.start_file("zae-limiter", SimpleFileOptions::default()).unwrap();
    zip.write_all(&a_program()).unwrap();
    let zip = zip.finish().unwrap().into_inner();
    assert!(matches!(Package::of(&zip, None), Err(PackageError::Garbled(_))));
}

#[test]
fn a_program_of_another_release_is_rejected() {
    let other = marked("[zae-limiter function 99.0.0]");
    let found = Some("99.0.0".to_owned());
    assert_eq!(Package::of(&other, None).expect_err("99"), PackageError::Release { found });
    // A program without a mark is somebody's own build; only the strict check rejects it.
    assert!(Package::of(&a_program(), None).is_ok());
    let error = Package::of_this_release(&a_program(), None).expect_err("no mark");
    assert_eq!(error, PackageError::Release { found: None });
    let ours = Package::of_this_release(&marked(RELEASE_MARK), None).unwrap();
    assert!(Package::of_this_release(ours.zip(), None).is_ok(), "also from its zip file");
}

#[test]
fn programs_of_other_systems_are_rejected_with_the_file_to_download() {
    for (program, kind) in [
        (mach_o(), NotLinux::MacOs),
        (vec![0xca, 0xfe, 0xba, 0xbe, 0, 0, 0, 2], NotLinux::MacOs),
        (pe(), NotLinux::Windows),
        (b"#!/bin/sh\n".to_vec(), NotLinux::Unknown),
    ] {
        let error = Package::of(&program, None).expect_err("no Linux program");
        assert_eq!(error, PackageError::NotLinux(kind));
        assert_eq!(
            error.hint(Some(Architecture::Arm64)),
            format!(
                "download https://github.com/zeroae/zae-limiter/releases/download/v{PROGRAM}/\
                 zae-limiter-{PROGRAM}-lambda-arm64.zip and \
                 https://github.com/zeroae/zae-limiter/releases/download/v{PROGRAM}/SHA256SUMS, \
                 then add --bootstrap zae-limiter-{PROGRAM}-lambda-arm64.zip --checksums SHA256SUMS"
            )
        );
    }
}

#[test]
fn a_program_for_another_processor_is_rejected() {
    let error = Package::of(&a_program(), Some(another())).expect_err("another processor");
    assert_eq!(error, PackageError::Architecture { found: here(), wanted: another() });
    assert!(error.hint(Some(another())).contains(another().as_str()));
}

#[test]
fn a_damaged_program_is_rejected() {
    let program = a_program();
    for garbage in [&b""[..], b"#!/bin/sh\n", &program[..40], &program[..program.len() / 2]] {
        assert!(Package::of(garbage, None).is_err());
    }
}

#[test]
fn a_program_that_needs_a_newer_c_library_is_rejected() {
    let program = a_program();
    let Some(needed) = Package::of(&program, None).unwrap().glibc() else { return };
    assert!(needed >= Glibc(2, 2), "{needed}");
    // Replaces the newest version that it needs by a later one of the same length.
    let (old, new) = (format!("GLIBC_{needed}\0"), "GLIBC_2.99\0");
    let patched = replace(&program, old.as_bytes(), new.as_bytes());
    let error = Package::of(&patched, None).expect_err("a newer C library");
    assert_eq!(error, PackageError::Glibc { needed: Glibc(2, 99) });
    for step in ["zigbuild", "lambda-x86_64.zip", "SHA256SUMS"] {
        assert!(error.hint(None).contains(step), "{step}");
    }
}

fn replace(text: &[u8], old: &[u8], new: &[u8]) -> Vec<u8> {
    assert_eq!(old.len(), new.len());
    let mut text = text.to_vec();
    let places: Vec<usize> =
        (0..text.len() - old.len()).filter(|at| text[*at..].starts_with(old)).collect();
    assert!(!places.is_empty());
    for at in places {
        text[at..at + new.len()].copy_from_slice(new);
    }
    text
}
