//! The Grafana dashboard and the table in the guide name every metric of the library.
#![allow(clippy::unwrap_used, reason = "a test says what is wrong by panicking")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde_json::Value;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn sources(folder: &Path, found: &mut Vec<String>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|ext| ext == "rs") {
            found.push(std::fs::read_to_string(&path).unwrap());
        }
    }
}

/// The names that the sources pass to a macro of the `metrics` facade.
fn recorded(macro_name: &str) -> BTreeSet<String> {
    let mut found = Vec::new();
    for name in ["core", "sqlite", "dynamodb"] {
        sources(&root().join(format!("crates/zae-limiter-{name}/src")), &mut found);
    }
    let start = format!("metrics::{macro_name}!(\"");
    let uses = found.iter().flat_map(|text| text.split(&start).skip(1));
    uses.map(|rest| rest.split('"').next().unwrap().to_owned()).collect()
}

/// Words that start with the prefix of our metrics.
fn names_in(text: &str) -> BTreeSet<String> {
    let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
    words.filter(|word| word.starts_with("zae_limiter_")).map(str::to_owned).collect()
}

/// The names in the queries of the dashboard, histograms without the suffixes of their series.
fn shown() -> BTreeSet<String> {
    let text = std::fs::read_to_string(root().join("docs/dashboards/grafana.json")).unwrap();
    let dashboard: Value = serde_json::from_str(&text).unwrap();
    let panels = dashboard["panels"].as_array().unwrap().iter();
    let targets = panels.flat_map(|panel| panel["targets"].as_array().unwrap());
    let names = targets.flat_map(|target| names_in(target["expr"].as_str().unwrap()));
    let histograms = recorded("histogram");
    let base = |name: String| {
        let mut bases =
            ["_bucket", "_sum", "_count"].iter().filter_map(|end| name.strip_suffix(end));
        bases.find(|base| histograms.contains(*base)).map(str::to_owned).unwrap_or(name)
    };
    names.map(base).collect()
}

#[test]
fn the_grafana_dashboard_shows_every_metric_of_the_library_and_no_other() {
    let mut recorded_names = recorded("counter");
    recorded_names.extend(recorded("histogram"));
    recorded_names.extend(recorded("gauge"));
    assert!(recorded_names.len() > 8, "{recorded_names:?}");
    // The tests of the aggregator compare the daemon's.
    let of_the_library =
        |name: &String| !name.starts_with("zae_limiter_aggregator_") && name != "zae_limiter_";
    let shown: BTreeSet<String> = shown().into_iter().filter(of_the_library).collect();
    assert_eq!(shown, recorded_names);
}
