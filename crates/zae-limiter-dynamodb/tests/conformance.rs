//! The store on the simulated table fulfils the contract that all stores do.
#![allow(clippy::unwrap_used, reason = "a test says what is wrong by panicking")]

#[allow(dead_code, reason = "not every test looks into the table")]
mod common;

use std::sync::Arc;

use common::TestTable;
use zae_limiter_dynamodb::{DynamoOptions, DynamoStore};

async fn open() -> Arc<DynamoStore> {
    let table = Arc::new(TestTable::default());
    Arc::new(DynamoStore::new(table, DynamoOptions::default()))
}

zae_limiter_testkit::conformance_tests!(dynamodb, open);
