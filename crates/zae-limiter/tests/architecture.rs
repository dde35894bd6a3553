//! ARCHITECTURE.md says what is true: the arrows between crates are those of `cargo metadata`.

#![allow(clippy::unwrap_used, reason = "a test says what is wrong by panicking")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

fn page() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../ARCHITECTURE.md")
}

/// One line for each crate: the crates of the workspace that it depends on, by name.
fn arrows() -> String {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../Cargo.toml");
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--no-deps", "--offline", "--format-version", "1", "--manifest-path"])
        .arg(manifest)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
    let packages = metadata["packages"].as_array().unwrap();
    let mut lines: Vec<String> = packages
        .iter()
        .map(|package| {
            // A normal dependency has no kind; those of the workspace have a path.
            let dependencies = package["dependencies"].as_array().unwrap().iter();
            let ours = dependencies.filter(|one| one["kind"].is_null() && !one["path"].is_null());
            let mut names: Vec<&str> = ours.map(|one| one["name"].as_str().unwrap()).collect();
            names.sort_unstable();
            names.dedup();
            let names = if names.is_empty() { "(none)".to_owned() } else { names.join(", ") };
            format!("{} -> {names}", package["name"].as_str().unwrap())
        })
        .collect();
    lines.sort_unstable();
    lines.join("\n")
}

#[test]
fn the_arrows_are_those_of_cargo() {
    const BEGIN: &str = "<!-- begin: crates -->";
    const END: &str = "<!-- end: crates -->";
    let text = fs::read_to_string(page()).unwrap();
    let (before, rest) = text.split_once(BEGIN).expect("a block of crates");
    let (block, after) = rest.split_once(END).expect("an end of that block");
    let expected = format!("\n```text\n{}\n```\n", arrows());
    if std::env::var_os("UPDATE_DOCS").is_some() {
        fs::write(page(), format!("{before}{BEGIN}{expected}{END}{after}")).unwrap();
        return;
    }
    assert_eq!(
        block, expected,
        "run UPDATE_DOCS=1 cargo test -p zae-limiter --test architecture to write it again"
    );
}

#[test]
fn the_page_is_short() {
    let lines = fs::read_to_string(page()).unwrap().lines().count();
    assert!(lines <= 250, "{lines} lines");
}

/// All files of Rust below a folder.
fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|kind| kind == "rs") {
            found.push(path);
        }
    }
}

/// Endpoint, credentials and time limits are the same for all services.
#[test]
fn one_place_loads_the_configuration_of_aws() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut files = Vec::new();
    for entry in fs::read_dir(&crates).unwrap() {
        sources(&entry.unwrap().path().join("src"), &mut files);
    }
    let loads = |path: &&PathBuf| {
        let text = fs::read_to_string(path).unwrap();
        [
            "aws_config::defaults",
            "aws_config::from_env",
            "load_defaults",
            "load_from_env",
            "ConfigLoader",
        ]
        .iter()
        .any(|call| text.contains(call))
    };
    let found: Vec<&PathBuf> = files.iter().filter(loads).collect();
    assert!(matches!(&found[..], [one] if one.ends_with("aws/lazy.rs")), "{found:?}");
}
