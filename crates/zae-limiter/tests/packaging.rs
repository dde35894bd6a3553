//! Every crate can be published, in the order that RELEASING.md gives: its sources include no file outside its folder.
#![allow(clippy::unwrap_used, reason = "a test says what is wrong by panicking")]

use std::path::{Component, Path, PathBuf};

fn rust_files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            rust_files(&path, found);
        } else if path.extension().is_some_and(|ext| ext == "rs") {
            found.push(path);
        }
    }
}

/// The relative paths in a source text, without those of its tests.
fn included(text: &str) -> Vec<&str> {
    let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    let literals = code.split('"').skip(1).step_by(2);
    literals.filter(|literal| literal.starts_with("../")).collect()
}

/// Whether a path from a folder that is `depth` levels below the crate's leaves the crate.
fn leaves(depth: usize, path: &str) -> bool {
    let up = Path::new(path).components().take_while(|one| *one == Component::ParentDir);
    up.count() > depth
}

#[test]
fn sources_include_nothing_from_outside_their_crate() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut seen = 0;
    for entry in std::fs::read_dir(crates).unwrap() {
        let folder = entry.unwrap().path();
        let mut files = Vec::new();
        rust_files(&folder.join("src"), &mut files);
        for file in files.iter().filter(|file| !file.to_string_lossy().ends_with("tests.rs")) {
            let depth = file.strip_prefix(&folder).unwrap().components().count() - 1;
            let text = std::fs::read_to_string(file).unwrap();
            for path in included(&text) {
                seen += 1;
                assert!(!leaves(depth, path), "{}: {path} is not published", file.display());
            }
        }
    }
    assert!(seen > 5, "the guides are included");
}

#[test]
fn a_path_that_leaves_the_crate_is_found() {
    assert_eq!(included("a(\"../x\"); b(\"y\")\n#[cfg(test)]\nmod tests {\n\"../z\""), ["../x"]);
    assert!(!leaves(1, "../README.md") && leaves(1, "../../README.md"));
    assert!(!leaves(2, "../../docs/a.md") && leaves(2, "../../../docs/a.md"));
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn manifest(name: &str) -> String {
    std::fs::read_to_string(root().join("crates").join(name).join("Cargo.toml")).unwrap()
}

/// The crates of RELEASING.md, in its order.
fn published() -> Vec<String> {
    let page = std::fs::read_to_string(root().join("RELEASING.md")).unwrap();
    let (_, list) = page.split_once("## The order of crates").expect("the section");
    let lines = list.lines().filter_map(|line| line.split_once(". `zae-limiter"));
    lines.map(|(_, rest)| format!("zae-limiter{}", rest.trim_end_matches('`'))).collect()
}

#[test]
fn crates_are_published_after_those_they_need() {
    let order = published();
    let folders = std::fs::read_dir(root().join("crates")).unwrap();
    assert_eq!(order.len(), folders.count(), "{order:?}");
    for (at, name) in order.iter().enumerate() {
        let manifest = manifest(name);
        // Also dev-dependencies: those with a version must exist when a crate is published.
        let needed = |other: &&String| {
            let mentions =
                [format!("\n{other}.workspace = true"), format!("\n{other} = {{ workspace")];
            mentions.iter().any(|mention| manifest.contains(mention))
        };
        let late: Vec<&String> = order[at..].iter().filter(needed).collect();
        assert!(late.is_empty(), "{name} needs {late:?}");
    }
}

#[test]
fn internal_crates_say_so_and_require_each_other_in_one_version() {
    let manifest_of_all = std::fs::read_to_string(root().join("Cargo.toml")).unwrap();
    let version = env!("CARGO_PKG_VERSION");
    for name in published() {
        let manifest = manifest(&name);
        let is_public = ["zae-limiter", "zae-limiter-cli", "zae-limiter-testkit"].contains(&&*name);
        let is_marked = manifest.contains("description = \"Internal to zae-limiter, ");
        assert_ne!(is_public, is_marked, "{name}");
        if name != "zae-limiter-cli" {
            let line = format!("{name} = {{ path = \"crates/{name}\", version = \"={version}\" }}");
            assert!(manifest_of_all.contains(&line), "{line}");
        }
    }
}
