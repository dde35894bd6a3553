//! Runs the conformance suite that every store must pass.

use std::sync::Arc;

use tempfile::TempDir;
use zae_limiter_sqlite::SqliteStore;

async fn open() -> (Arc<SqliteStore>, TempDir) {
    let folder = tempfile::tempdir().expect("a folder for temporary files");
    let store = SqliteStore::open(folder.path().join("limits.db")).expect("a new file");
    (Arc::new(store), folder)
}

zae_limiter_testkit::conformance_tests!(sqlite, open);
zae_limiter_testkit::usage_conformance_tests!(sqlite_usage, open);
zae_limiter_testkit::one_step_conformance_tests!(sqlite_steps, open);
