//! Deploying from a machine whose own program Lambda cannot run, with the function of the release.
#![cfg(target_os = "linux")]

use std::path::PathBuf;

use zae_limiter_infra::{Architecture, CHECKSUMS, ChecksumError, Checksums, RELEASE_MARK};

use super::session::Session;

/// A program of every Linux.
fn linux() -> Vec<u8> {
    std::fs::read("/bin/sh").unwrap()
}

/// The same program for the processor with this number in the header of ELF.
fn linux_for(machine: u8) -> Vec<u8> {
    let mut program = linux();
    (program[18], program[19]) = (machine, 0);
    program
}

const ARM64: u8 = 183;

fn mach_o() -> Vec<u8> {
    [&[0xcf, 0xfa, 0xed, 0xfe][..], &[0; 60]].concat()
}

fn pe() -> Vec<u8> {
    [&b"MZ"[..], &[0; 62]].concat()
}

/// A machine with files, and the program on it.
struct Machine {
    session: Session,
}

impl Machine {
    fn new(own: &[u8]) -> Self {
        let mut session = Session::new();
        let program = session.folder().join("zae-limiter");
        std::fs::write(&program, own).unwrap();
        session.program = Some(program);
        Self { session }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.session.folder().join(name)
    }

    fn put(&self, name: &str, content: impl AsRef<[u8]>) {
        std::fs::write(self.path(name), content).unwrap();
    }

    /// Downloads the zip file of a release with this program in it.
    fn download(&mut self, name: &str, program: &[u8]) {
        self.put("built", program);
        let (from, to) = (self.path("built"), self.path(name));
        let line =
            format!("lambda-export --force '{}' --bootstrap '{}'", to.display(), from.display());
        let (status, _, stderr) = self.session.run_unseen(&line, usize::MAX);
        assert_eq!(status, 0, "{stderr}");
    }

    /// Downloads the checksums of a release with these files.
    fn list(&self, names: &[&str]) {
        let zero = "0".repeat(64);
        let sums = names.iter().map(|name| {
            let content = std::fs::read(self.path(name)).unwrap();
            let wrong = Checksums::parse(&format!("{zero}  {name}")).unwrap();
            match wrong.check(name, &content) {
                Err(ChecksumError::Differs { found, .. }) => format!("{found}  {name}\n"),
                other => panic!("{other:?}"),
            }
        });
        self.put(CHECKSUMS, sums.collect::<String>());
    }

    /// Exports the function with these options. `@` stands for the folder.
    fn export(&mut self, options: &str) -> (u8, String) {
        let folder = self.session.folder().display().to_string();
        let line = format!("lambda-export @out.zip {options}").replace('@', &format!("{folder}/"));
        let (status, _, stderr) = self.session.run_unseen(&line, usize::MAX);
        (status, stderr.replace(&format!("{folder}/"), "@"))
    }
}

fn name() -> String {
    zae_limiter_infra::function_file(Architecture::X86_64)
}

fn ours() -> Vec<u8> {
    [&linux_for(62)[..], RELEASE_MARK.as_bytes()].concat()
}

#[test]
fn a_program_of_macos_or_windows_names_the_file_to_download() {
    let version = env!("CARGO_PKG_VERSION");
    let base = format!("https://github.com/zeroae/zae-limiter/releases/download/v{version}");
    for (own, kind) in [(mach_o(), "macOS"), (pe(), "Windows")] {
        let mut machine = Machine::new(&own);
        for (options, architecture) in [("", "x86_64"), ("--architecture arm64", "arm64")] {
            let file = format!("zae-limiter-{version}-lambda-{architecture}.zip");
            let expected = format!(
                "error: cannot deploy @zae-limiter as the aggregator\n  \
                 cause: it is a {kind} program, and Lambda runs Linux programs\n  \
                 hint: download {base}/{file} and {base}/SHA256SUMS, \
                 then add --bootstrap {file} --checksums SHA256SUMS\n"
            );
            assert_eq!(machine.export(options), (2, expected));
        }
        // `deploy` says so before it calls AWS.
        let (status, _, stderr) = machine.session.run_unseen("deploy --name my-app", usize::MAX);
        assert!(status == 2 && stderr.contains("download https://"), "{status}: {stderr}");
        let (status, out, stderr) =
            machine.session.run_unseen("deploy --name my-app -o json", usize::MAX);
        let error: serde_json::Value = serde_json::from_str(&stderr).unwrap();
        assert!(status == 2 && out.is_empty() && error["hint"].is_string(), "{out} {stderr}");
    }
}

#[test]
fn the_file_of_the_release_is_used_when_its_checksum_is_right() {
    let mut machine = Machine::new(&mach_o());
    machine.download(&name(), &ours());
    machine.list(&[&name()]);
    let options = format!("--bootstrap @{} --checksums @SHA256SUMS", name());
    let (status, stderr) = machine.export(&options);
    assert_eq!(status, 0, "{stderr}");
    // The same program gives the same zip file.
    let (written, from) = (machine.path("out.zip"), machine.path(&name()));
    assert_eq!(std::fs::read(written).unwrap(), std::fs::read(from).unwrap());
}

#[test]
fn a_zip_file_needs_checksums_that_list_it() {
    let mut machine = Machine::new(&mach_o());
    machine.download(&name(), &ours());
    let file = name();
    let (status, stderr) = machine.export(&format!("--bootstrap @{file}"));
    assert_eq!(status, 2);
    assert!(stderr.contains(&format!("@{file} is a zip file without checksums")), "{stderr}");
    assert!(stderr.contains("/SHA256SUMS and add --checksums SHA256SUMS"), "{stderr}");
    machine.put("other", "x");
    machine.list(&["other"]);
    for (list, said) in [
        (None, format!("the checksums do not list {file}")),
        (Some("<html>404</html>".to_owned()), "line 1 of the checksums is not".to_owned()),
        (Some(format!("{}  {file}", "0".repeat(64))), "and the checksums say 000".to_owned()),
    ] {
        if let Some(list) = list {
            machine.put(CHECKSUMS, list);
        }
        let options = format!("--bootstrap @{file} --checksums @SHA256SUMS");
        let (status, stderr) = machine.export(&options);
        assert_eq!(status, 2, "{stderr}");
        assert!(stderr.contains(&said), "{stderr}");
        assert!(stderr.contains("hint: download https://"), "{stderr}");
        assert!(!machine.path("out.zip").exists(), "{said}");
    }
}

#[test]
fn checksums_also_apply_to_an_executable() {
    let mut machine = Machine::new(&mach_o());
    machine.put("build", linux());
    machine.list(&["build"]);
    let options = "--bootstrap @build --checksums @SHA256SUMS";
    assert_eq!(machine.export(options).0, 0);
    machine.put("build", [&linux()[..], b"."].concat());
    let (status, stderr) = machine.export(options);
    assert!(status == 2 && stderr.contains("its SHA-256 is"), "{stderr}");
    assert_eq!(machine.export("--checksums @SHA256SUMS").0, 2, "of which file?");
}

#[test]
fn a_file_for_another_processor_or_of_another_release_is_rejected() {
    let mut machine = Machine::new(&mach_o());
    let arm = [&linux_for(ARM64)[..], RELEASE_MARK.as_bytes()].concat();
    machine.download(&name(), &arm);
    machine.list(&[&name()]);
    let options = format!("--bootstrap @{} --checksums @SHA256SUMS", name());
    let (status, stderr) = machine.export(&format!("{options} --architecture x86_64"));
    assert_eq!(status, 2);
    assert!(stderr.contains("it is built for arm64, not for x86_64"), "{stderr}");
    assert_eq!(machine.export(&options).0, 0, "without a choice the file decides");

    // Not a function at all, though a Linux program in a zip file.
    machine.download(&name(), &linux());
    machine.list(&[&name()]);
    let (status, stderr) = machine.export(&options);
    assert!(status == 2 && stderr.contains("it is not the program zae-limiter"), "{stderr}");

    machine.put("older", [&linux()[..], b"[zae-limiter function 0.0.9]"].concat());
    let (status, stderr) = machine.export("--bootstrap @older");
    assert!(status == 2 && stderr.contains("it belongs to release 0.0.9, not to"), "{stderr}");
}
