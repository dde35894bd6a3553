//! The clock stands still during a load, so that every figure is the same in every run.

use std::time::Duration;

use crate::session::Session;

#[test]
fn everything_is_admitted_by_default() {
    let mut session = Session::new();
    session.run("bench --store memory: --each 20 --concurrency 4 --entities 10");
    session.run("bench --store memory: --each 20 --concurrency 4 --entities 10 -o json");
    session.run("bench --each 20 --concurrency 4 --entities 10");
    insta::assert_snapshot!(session.transcript);
}

#[test]
fn limits_refuse_and_hold() {
    let mut session = Session::new();
    session.run("bench --store memory: --each 20 --concurrency 8 --entities 3 -l rpm:10 -l tpm:900:1000 -c tpm:70 -c rpm:1");
    session.run("bench --store memory: --each 20 --concurrency 1 --entities 1 -l rpm:7");
    session.run("bench --store memory: --each 20 --concurrency 1 --entities 1 -c rpm:2 -o json");
    insta::assert_snapshot!(session.transcript);
}

#[test]
fn one_entity_of_ones_own() {
    let mut session = Session::new();
    session.run("bench --entity key-1 --each 5");
    session.run("bench --entity key-1 --each 5 --concurrency 4 --resource gpt-4 -l rpm:12");
    session.run("available key-1 gpt-4");
    // The entity stays, without the tokens that the load took.
    session.run("acquire key-1 gpt-4 -l rpm:12 -c rpm:1");
    insta::assert_snapshot!(session.transcript);
}

#[test]
fn beside_an_earlier_result() {
    let mut session = Session::new();
    let file = session.folder().join("earlier.json");
    let earlier = r#"{"store": "sqlite:x", "seconds": 10.0, "acquires": 1000,
        "acquires_per_second": 100.0, "admitted": 1000, "refused": 0, "over_admitted": 0,
        "latency_ms": {"p50": 1.0, "p99": 2.0, "max": 3.0}, "round_trips_per_acquire": null,
        "write_units_per_acquire": null, "read_units_per_acquire": null, "failed": 0,
        "entities": 1000, "concurrency": 64, "consume": ["rpm:1"], "baseline_per_second": null, "ratio_to_baseline": null}"#;
    std::fs::write(&file, earlier).unwrap();
    let load = "bench --store memory: --each 2 --concurrency 1 --entities 1";
    session.run(&format!("{load} --compare {}", file.display()));
    std::fs::write(&file, "{\"store\": 1}").unwrap();
    session.run(&format!("{load} --compare {}", file.display()));
    session.run(&format!("{load} --compare {}", session.folder().join("missing.json").display()));
    let transcript = session.transcript.replace(&*session.folder().to_string_lossy(), "FOLDER");
    insta::assert_snapshot!(transcript);
}

#[test]
fn ctrl_c_ends_it_with_what_was_measured() {
    let mut session = Session::new();
    session.interrupt_after = Some(Duration::from_secs(1));
    assert_eq!(session.run("bench --store memory: --entities 2 --concurrency 2"), 130);
    insta::assert_snapshot!(session.transcript);
}

#[test]
fn what_cannot_be_asked() {
    let mut session = Session::new();
    for line in [
        "bench --entities 0",
        "bench --concurrency 5000",
        "bench --each 5 --duration 1s",
        "bench --store memory: --duration 0s",
        "bench --store memory: --duration 12h",
        "bench --store memory: --each 1 --warm-up 13h",
        "bench --entity key-1 --entities 5",
        "bench --store memory: --each 5 -c rpm:1 -l tpm:10",
        "bench --store memory: --each 5 -c rpm:11 -l rpm:10",
        "bench --store memory: --each 5 -l rpm:10 -l rpm:11",
        "bench --store memory: --each 5 --entity key-1 -l rpm:10 -c tpm:1",
    ] {
        session.run(line);
    }
    insta::assert_snapshot!(session.transcript);
}

/// Successful runs are in `tests/endpoint/bench.rs`.
#[test]
fn shards_where_they_cannot_be_asked() {
    let mut session = Session::new();
    let store = "--store dynamodb:my-app?region=us-east-1&endpoint=http://127.0.0.1:1";
    for line in [
        "bench --shards 1,8 --store memory:",
        "bench --shards 1,8 --store sqlite:limits.db",
        "bench --shards 1,8",
        "bench --shards 1,8 --store memory: -o json",
    ] {
        session.run(line);
    }
    assert!(!session.folder().join("limits.db").exists(), "no store was created");
    for options in [
        "--shards 0",
        "--shards 1,3",
        "--shards 128",
        "--shards 1,,8",
        "--shards many",
        "--shards 1,8 --entities 5",
        "--shards 1,8 --entity key-1",
        "--shards 1,8 --compare earlier.json",
        "--shards 1,8 --processes 0",
        "--shards 1,8 --processes 9 --concurrency 8",
        "--shards 1,8 --each 5 -c rpm:1 -l tpm:10",
        "--processes 4",
        "--shards 1,8",
    ] {
        session.run(&format!("bench {store} {options}"));
    }
    insta::assert_snapshot!(session.transcript);
}

#[test]
fn nothing_is_left_of_its_namespace_nor_of_its_scratch_file() {
    let mut session = Session::new();
    let url = format!("sqlite:{}", session.folder().join("limits.db").display());
    assert_eq!(session.run(&format!("bench --each 20 --store {url}")), 0);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let limiter = zae_limiter::open(&url).await.unwrap();
        let namespaces = limiter.namespaces();
        assert_eq!(namespaces.list().all().await.unwrap().len(), 1);
        assert!(namespaces.orphans().all().await.unwrap().is_empty());
    });
    let files = std::fs::read_dir(session.folder()).unwrap();
    let mut files: Vec<_> = files.map(|file| file.unwrap().file_name()).collect();
    files.sort();
    assert_eq!(files, ["limits.db"]);
}
