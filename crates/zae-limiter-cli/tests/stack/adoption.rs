//! Migrates tables that the Python client filled: in one run, and in runs that end after each of their
//! writes. All clients read the same before and after.

use std::sync::Arc;

use serde_json::{Value, json};
use zae_limiter::dynamodb::aws::AwsTable;
use zae_limiter::infra::migrate::{MigrateError, Migration};
use zae_limiter::testing::{Clock as _, SystemClock};
use zae_limiter_testkit::CutOff;

use crate::aws::{self, ROOT, python, python_client, python_usage, run};

/// A table that a release of the Python client has filled.
struct Filled {
    release: &'static str,
    table: String,
}

impl Filled {
    fn by(release: &'static str, table: &str) -> Self {
        let table = format!("{table}-{}", release.replace('.', "-"));
        // Nothing is refilled while the test runs.
        let slow = json!([["rpm", 1_000, 1, 86_400]]);
        let of = |entity: &str, take: i64| json!({ "entity": entity, "resource": "gpt-4", "take": { "rpm": take } });
        let fill = [
            ("create_table", json!({})),
            ("set_resource", json!({ "resource": "gpt-4", "limits_": slow })),
            ("create_entity", json!({ "entity": "org" })),
            ("create_entity", json!({ "entity": "key-1", "parent": "org", "cascade": true })),
            ("set_limits", json!({ "entity": "key-2", "resource": "gpt-4", "limits_": slow })),
            ("acquire", of("key-1", 100)),
            ("acquire", of("key-2", 7)),
        ];
        for (answer, (op, _)) in python_client(release, &table, &fill).iter().zip(&fill) {
            assert!(answer.get("error").is_none(), "{release} {op}: {answer}");
        }
        let booked = python_usage(release, &table, "book");
        assert_eq!(requests(&booked, "hourly") + requests(&booked, "daily"), 76, "{booked}");
        Self { release, table }
    }

    /// The same items in another table.
    fn copy(&self, number: u32) -> Self {
        let table = format!("{}-{number}", self.table);
        python_client(self.release, &table, &[("create_table", json!({}))]);
        python(&format!(
            "t = make('dynamodb')\n\
             for page in t.get_paginator('scan').paginate(TableName='{}'):\n\
             \x20 [t.put_item(TableName='{table}', Item=item) for item in page['Items']]",
            self.table
        ));
        Self { release: self.release, table }
    }

    /// Entities, limits and balances, as the Python client and as we read them.
    fn read(&self) -> (Vec<Value>, Vec<Value>) {
        let on = |entity: &str| json!({ "entity": entity, "resource": "gpt-4" });
        let read = [
            ("available", on("key-1")),
            ("available", on("org")),
            ("available", on("key-2")),
            ("entity", json!({ "entity": "key-1" })),
            ("children", json!({ "entity": "org" })),
            ("resource", json!({ "resource": "gpt-4" })),
            ("limits", on("key-2")),
        ];
        let ours = ["key-1", "org", "key-2"].map(|entity| {
            let words = format!("available {entity} gpt-4 --name {} -o json", self.table);
            run(&words).json()["limits"].clone()
        });
        (python_client(self.release, &self.table, &read), ours.to_vec())
    }

    /// The total is as before, and each window has its own usage.
    fn check_usage(&self) {
        let usage = python_usage(self.release, &self.table, "read");
        assert_eq!((requests(&usage, "hourly"), requests(&usage, "daily")), (38, 38), "{usage}");
        for (window, wanted) in [("hourly", vec![7, 20, 11]), ("daily", vec![27, 11])] {
            let words = format!("usage list -e key-1 -r gpt-4 -w {window} --start 2026-11-01");
            let list = run(&format!("{words} --name {} -o json", self.table)).json();
            let list = list.as_array().unwrap().iter();
            let used: Vec<i64> = list.map(|one| one["consumed"]["rpm"].as_i64().unwrap()).collect();
            assert_eq!(used, wanted, "{window} in {}", self.table);
        }
    }

    /// Runs `upgrade` and returns its report of the migration.
    fn upgrade(&self) -> Value {
        run(&format!("upgrade --name {} -o json", self.table)).json()["migration"].clone()
    }

    fn sdk(&self) -> AwsTable {
        AwsTable::new(aws::client(aws::endpoint(), ROOT), &self.table, Arc::new(SystemClock))
    }
}

/// The requests of all usage records of a window.
fn requests(usage: &Value, window: &str) -> i64 {
    let rows = usage.as_array().unwrap().iter().filter(|row| row[0] == window);
    rows.map(|row| row[2].as_i64().unwrap()).sum()
}

fn a_table_is_adopted(release: &'static str) {
    let filled = Filled::by(release, "from");
    let before = filled.read();
    assert_eq!(before.0[0]["ok"]["rpm"], 900, "{:?}", before.0);
    assert_eq!(before.1[0][0]["available"], 900);
    let counts = filled.upgrade();
    let number = |name: &str| counts[name].as_i64().unwrap();
    assert_eq!((number("unknown_items"), number("inexact_usage_items")), (0, 0), "{counts}");
    assert_eq!(number("usage_records"), 2, "{counts}");
    assert_eq!(filled.read(), before, "{release}");
    filled.check_usage();
    // Both clients continue to share the table.
    let table = &filled.table;
    assert_eq!(run(&format!("acquire key-1 gpt-4 -c rpm:50 --name {table}")).code, 0);
    assert_eq!(filled.read().0[0]["ok"]["rpm"], 850);
    assert_eq!(run(&format!("check --name {table}")).code, 0);
}

/// Ends a run after a number of writes. Returns whether it was complete.
fn cut_off(filled: &Filled, writes: u32) -> bool {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let table = CutOff::after(writes, filled.sdk());
        let migration = Migration::new(SystemClock.now());
        match migration.migrate(&table, &filled.sdk(), &mut |_| {}).await {
            Ok(_) => true,
            Err(MigrateError::Table(error)) if error.to_string().contains("cut off") => false,
            Err(error) => panic!("{}: {error:?}", filled.table),
        }
    })
}

/// All clients read the same in the middle of a migration, and `upgrade` completes it.
fn a_table_is_adopted_by_runs_that_are_cut_off(release: &'static str) {
    let filled = Filled::by(release, "cut");
    let before = filled.read();
    for writes in 0.. {
        let copy = filled.copy(writes);
        let is_done = cut_off(&copy, writes);
        assert_eq!(copy.read(), before, "{} after {writes} writes", copy.table);
        let usage = python_usage(release, &copy.table, "read");
        assert_eq!(requests(&usage, "hourly") + requests(&usage, "daily"), 76, "{usage}");
        let counts = copy.upgrade();
        assert_eq!(counts.is_null(), is_done, "{} after {writes} writes: {counts}", copy.table);
        assert_eq!(copy.read(), before, "{} after {writes} writes and the rest", copy.table);
        copy.check_usage();
        assert_eq!(copy.upgrade(), Value::Null, "nothing is left to do");
        if is_done {
            // Two usage items are split, and the version is written last. Both releases wrote all
            // index entries themselves.
            assert_eq!(writes, 3);
            return;
        }
    }
}

#[test]
fn a_table_of_the_python_client_0_10_3_is_adopted() {
    a_table_is_adopted("0.10.3");
}

#[test]
fn a_table_of_the_python_client_0_17_0_is_adopted() {
    a_table_is_adopted("0.17.0");
}

#[test]
fn a_table_of_the_python_client_0_10_3_is_adopted_by_runs_that_are_cut_off() {
    a_table_is_adopted_by_runs_that_are_cut_off("0.10.3");
}

#[test]
fn a_table_of_the_python_client_0_17_0_is_adopted_by_runs_that_are_cut_off() {
    a_table_is_adopted_by_runs_that_are_cut_off("0.17.0");
}
