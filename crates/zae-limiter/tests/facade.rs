//! The public face: which names stand at the root, and that each has an example.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// The names at the root, features included, and the modules beside them.
const ROOT: &[&str] = &[
    "Acquire",
    "BucketStatus",
    "Builder",
    "Config",
    "Durability",
    "DynamoOptions",
    "DynamoStore",
    "EffectiveLimits",
    "Entity",
    "Error",
    "Lease",
    "Limit",
    "LimitStatus",
    "MemoryStore",
    "Namespaces",
    "OnDrop",
    "OnUnavailable",
    "Pages",
    "Prepared",
    "PreparedLease",
    "PublicRefusal",
    "RateLimitExceeded",
    "RateLimiter",
    "SqliteOptions",
    "SqliteStore",
    "StoreUrl",
    "Timestamp",
    "UsageSummary",
    "Window",
    "builder",
    "ensure_stack",
    "open",
];

const MODULES: &[&str] = &["blocking", "dynamodb", "guide", "infra", "model", "store", "testing"];

fn crates() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The public names of lib.rs outside of any module.
fn root_names(source: &str) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    // Items at the root start at the first column; what is inside a module is indented.
    let mut lines = source.lines().peekable();
    while let Some(line) = lines.next() {
        if let Some(used) = line.strip_prefix("pub use ") {
            let mut used = used.to_owned();
            while !used.ends_with(';') {
                used.push_str(lines.next().expect("a use that ends").trim());
            }
            assert!(!used.contains('*'), "a glob hides what is at the root: {used}");
            let list = used.trim_end_matches(';');
            let list = list.split_once('{').map_or_else(
                || list.rsplit("::").next().unwrap_or(list).to_owned(),
                |(_, list)| list.trim_end_matches('}').to_owned(),
            );
            let each = list.split(',').map(str::trim).filter(|name| !name.is_empty());
            names.extend(each.map(|name| name.rsplit(" as ").next().unwrap_or(name).to_owned()));
        }
        for item in
            ["pub fn ", "pub async fn ", "pub mod ", "pub struct ", "pub enum ", "pub trait "]
        {
            if let Some(rest) = line.strip_prefix(item) {
                let end =
                    rest.find(|c: char| !(c.is_alphanumeric() || c == '_')).unwrap_or(rest.len());
                names.insert(rest[..end].to_owned());
            }
        }
    }
    names
}

#[test]
fn the_root_holds_what_a_user_needs_and_no_more() {
    let source = fs::read_to_string(crates().join("zae-limiter/src/lib.rs")).unwrap();
    let expected: BTreeSet<String> = ROOT.iter().chain(MODULES).map(|n| (*n).to_owned()).collect();
    assert_eq!(root_names(&source), expected);
    assert_eq!(ROOT.len(), 32);
}

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("a folder of sources").flatten() {
        let path = entry.path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|end| end == "rs") {
            found.push(path);
        }
    }
}

/// The doc comment right above the item's definition.
fn docs_of(name: &str, source: &str) -> Option<String> {
    let lines: Vec<&str> = source.lines().collect();
    let is_definition = |line: &&str| {
        ["pub struct ", "pub enum ", "pub fn ", "pub async fn "].iter().any(|item| {
            line.strip_prefix(item)
                .and_then(|rest| rest.strip_prefix(name))
                .is_some_and(|rest| rest.starts_with(|c: char| !(c.is_alphanumeric() || c == '_')))
        })
    };
    let at = lines.iter().position(is_definition)?;
    let above = lines[..at].iter().rev();
    let docs = above.take_while(|line| {
        line.starts_with("///") || line.starts_with("//") || line.starts_with("#[")
    });
    Some(docs.copied().collect::<Vec<_>>().join("\n"))
}

#[test]
fn each_name_at_the_root_has_an_example() {
    let mut files = Vec::new();
    for package in [
        "zae-limiter",
        "zae-limiter-core",
        "zae-limiter-model",
        "zae-limiter-sqlite",
        "zae-limiter-dynamodb",
    ] {
        sources(&crates().join(package).join("src"), &mut files);
    }
    let texts: Vec<String> = files.iter().map(|file| fs::read_to_string(file).unwrap()).collect();
    let without: Vec<&str> = ROOT
        .iter()
        .filter(|name| {
            let docs: Vec<String> = texts.iter().filter_map(|text| docs_of(name, text)).collect();
            assert!(!docs.is_empty(), "{name} is defined nowhere");
            !docs.iter().any(|docs| docs.contains("```"))
        })
        .copied()
        .collect();
    assert!(without.is_empty(), "without an example: {without:?}");
}

#[test]
fn the_axum_example_is_short() {
    let example = crates().join("zae-limiter/examples/axum_429.rs");
    let lines = fs::read_to_string(example).unwrap().lines().count();
    assert!(lines <= 40, "{lines} lines");
}
