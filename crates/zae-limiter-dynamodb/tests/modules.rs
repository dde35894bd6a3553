//! How the modules of the crate depend on each other, read off their `use` lines.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

type Graph = BTreeMap<String, BTreeSet<String>>;

fn sources(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).expect("a folder of sources") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            found.extend(sources(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
    found
}

/// `bucket::machine` for `bucket/machine.rs`; the crate's root has an empty name.
fn name_of(path: &Path, root: &Path) -> String {
    let inside = path.strip_prefix(root).expect("below the root").with_extension("");
    let names: Vec<&str> =
        inside.iter().map(|shard| shard.to_str().expect("plain names")).collect();
    match names.as_slice() {
        ["lib"] => String::new(),
        [folders @ .., "mod"] => folders.join("::"),
        all => all.join("::"),
    }
}

/// The code without its tests and comments.
fn code_of(path: &Path) -> String {
    let source = std::fs::read_to_string(path).expect("a readable source");
    let code = source.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    let is_code = |line: &&str| !line.trim_start().starts_with("//");
    code.lines().filter(is_code).collect::<Vec<&str>>().join("\n")
}

/// The paths that a file names after `crate::` or `super::`, as modules that exist.
fn used_by(module: &str, code: &str, modules: &BTreeSet<String>) -> BTreeSet<String> {
    let above = module.rsplit_once("::").map_or("", |(above, _)| above);
    let mut used = BTreeSet::new();
    for (marker, base) in [("crate::", ""), ("super::", above)] {
        for (at, _) in code.match_indices(marker) {
            let rest = &code[at + marker.len()..];
            let is_path = |letter: char| letter.is_alphanumeric() || "_:{}, \n".contains(letter);
            let path: String = rest.chars().take_while(|letter| is_path(*letter)).collect();
            // `crate::{a, b::c}` names several.
            let tails: Vec<String> = match path.strip_prefix('{') {
                Some(list) => list.split(',').map(|one| one.trim().to_owned()).collect(),
                None => vec![path],
            };
            for tail in tails {
                let mut name = base.to_owned();
                for segment in tail.split("::") {
                    let segment: String =
                        segment.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
                    let longer =
                        if name.is_empty() { segment } else { format!("{name}::{segment}") };
                    if !modules.contains(&longer) {
                        break;
                    }
                    name = longer;
                }
                used.insert(name);
            }
        }
    }
    used.remove(module);
    used
}

fn graph() -> Graph {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let files: Vec<(String, PathBuf)> = sources(&root)
        .into_iter()
        .map(|path| (name_of(&path, &root), path))
        .filter(|(name, _)| !name.starts_with("aws") && !name.ends_with("_tests"))
        .collect();
    let modules: BTreeSet<String> = files.iter().map(|(name, _)| name.clone()).collect();
    files
        .into_iter()
        .map(|(name, path)| {
            let used = used_by(&name, &code_of(&path), &modules);
            (name, used)
        })
        .collect()
}

/// A path from a module back to itself.
fn cycle(graph: &Graph) -> Option<Vec<String>> {
    fn walk(graph: &Graph, path: &mut Vec<String>, done: &mut BTreeSet<String>) -> bool {
        let here = path.last().expect("a start").clone();
        if path[..path.len() - 1].contains(&here) {
            return true;
        }
        if done.contains(&here) {
            return false;
        }
        for next in &graph[&here] {
            path.push(next.clone());
            if walk(graph, path, done) {
                return true;
            }
            path.pop();
        }
        done.insert(here);
        false
    }
    let mut done = BTreeSet::new();
    graph.keys().find_map(|start| {
        let mut path = vec![start.clone()];
        walk(graph, &mut path, &mut done).then_some(path)
    })
}

#[test]
fn modules_have_no_cycles() {
    let graph = graph();
    assert!(
        graph["bucket::machine"].contains("bucket::decide"),
        "the graph is not read: {graph:?}"
    );
    assert!(graph["buckets"].contains("bucket::machine"), "the graph is not read: {graph:?}");
    assert_eq!(cycle(&graph), None);
    let tangled = Graph::from([
        ("a".to_owned(), BTreeSet::from(["b".to_owned()])),
        ("b".to_owned(), BTreeSet::from(["a".to_owned()])),
    ]);
    assert!(cycle(&tangled).is_some(), "a cycle is found where there is one");
}

#[test]
fn what_decides_does_no_io() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/bucket");
    for path in sources(&root) {
        if path.ends_with("machine_tests.rs") {
            continue;
        }
        let code = code_of(&path);
        for forbidden in
            ["tokio", "dyn Table", "Table,", "Table}", "Instant", "SystemTime", "Clock"]
        {
            assert!(!code.contains(forbidden), "{} names {forbidden}", path.display());
        }
    }
}

#[test]
fn nothing_spawns_but_the_driver_on_its_runtime() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    for path in sources(&root) {
        let name = name_of(&path, &root);
        if ["driver", "runtime"].contains(&name.as_str()) || name.starts_with("aws") {
            continue;
        }
        let code = code_of(&path);
        // `calls` hands its work to the driver.
        let spawns = code.matches("spawn").count() - code.matches("self.spawn(Box::pin(").count();
        assert_eq!(spawns, 0, "{name} spawns");
    }
}
