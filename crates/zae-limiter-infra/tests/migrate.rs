//! Migrations of the Python client's tables lose nothing, change nothing that other clients read,
//! and can be repeated after an interruption.
#![allow(clippy::unwrap_used, reason = "a test says what is wrong by panicking")]

use zae_limiter_core::{BoxFuture, NamespaceId, Timestamp, Window};
use zae_limiter_infra::migrate::{Counts, MigrateError, Migration, Run, Scan, is_needed};
use zae_limiter_infra::records::read_version;
use zae_limiter_schema::{Action, Item, ItemKey, Table, TableError, Update, Value};
use zae_limiter_testkit::{CutOff, SimTable};

const NS: &str = "abcdefghijk";
const OTHER: &str = "kjihgfedcba";
/// 2026-11-16T12:00:00Z
const NOW: Timestamp = Timestamp::from_millis(1_794_830_400_000);

/// Pages of two items.
struct Scanning(SimTable);

impl Scan for Scanning {
    fn page<'a>(
        &'a self,
        after: Option<&'a ItemKey>,
    ) -> BoxFuture<'a, Result<(Vec<Item>, Option<ItemKey>), TableError>> {
        let mut items = self.0.items();
        items.sort_by_key(key_of);
        let mut rest = items.into_iter().filter(|item| after.is_none_or(|key| key_of(item) > *key));
        let page: Vec<Item> = rest.by_ref().take(2).collect();
        let next = rest.next().and_then(|_| page.last().map(key_of));
        Box::pin(std::future::ready(Ok((page, next))))
    }
}

fn key_of(item: &Item) -> ItemKey {
    let text = |name: &str| item[name].as_str().unwrap().to_owned();
    ItemKey::new(text("PK"), text("SK"))
}

/// Puts an item as the Python client does.
async fn put(table: &SimTable, pk: &str, sk: &str, attributes: &[(&str, Value)]) {
    let key = ItemKey::new(pk, sk);
    let set = |(name, value): &(&str, Value)| Action::Set((*name).to_owned(), value.clone());
    let actions = attributes.iter().map(set).collect();
    table.update(&Update { key, actions, conditions: Vec::new() }).await.unwrap();
}

fn text(text: &str) -> Value {
    Value::text(text)
}

fn number(number: i64) -> Value {
    Value::number(number)
}

async fn usage(table: &SimTable, window: &str, start: &str, tpm: i64, events: i64) {
    let attributes = [
        ("entity_id", text("key-1")),
        ("resource", text("gpt-4")),
        ("window", text(window)),
        ("window_start", text(start)),
        ("tpm", number(tpm)),
        ("total_events", number(events)),
        ("ttl", number(1_900_000_000)),
        ("GSI2PK", text(&format!("{NS}/RESOURCE#gpt-4"))),
        ("GSI2SK", text(&format!("USAGE#{start}#key-1"))),
    ];
    put(table, &format!("{NS}/ENTITY#key-1"), &format!("#USAGE#gpt-4#{start}"), &attributes).await;
}

async fn bucket(table: &SimTable, entity: &str, ttl: Option<i64>) {
    let mut attributes = vec![
        ("entity_id", text(entity)),
        ("b_tpm_tk", number(5_000)),
        ("b_tpm_cp", number(10_000)),
        ("rf", number(1_794_830_000_000)),
    ];
    attributes.extend(ttl.map(|ttl| ("ttl", number(ttl))));
    put(table, &format!("{NS}/BUCKET#{entity}#gpt-4#0"), "#STATE", &attributes).await;
}

/// A table of release 0.9.0: some index entries are missing, and two days of usage share items.
async fn given() -> SimTable {
    let table = SimTable::default();
    let version = [("schema_version", text("0.9.0")), ("client_min_version", text("0.9.0"))];
    put(&table, "_/SYSTEM#", "#VERSION", &version).await;
    let meta = [
        ("entity_id", text("key-1")),
        ("parent_id", text("org")),
        ("cascade", Value::Bool(true)),
        ("theirs", text("kept")),
    ];
    put(&table, &format!("{NS}/ENTITY#key-1"), "#META", &meta).await;
    let config = [("l_tpm_cp", number(100)), ("l_tpm_ra", number(100)), ("l_tpm_rp", number(60))];
    put(&table, &format!("{NS}/ENTITY#key-1"), "#CONFIG#gpt-4", &config).await;
    put(&table, &format!("{OTHER}/SYSTEM#"), "#CONFIG", &config).await;
    bucket(&table, "key-1", None).await;
    bucket(&table, "idle", Some(NOW.as_millis() / 1_000 - 1)).await;
    // The 15th: 7 from 00:00 on, 20 from 09:00 on; the shared item has 7 + 27.
    usage(&table, "hourly", "2026-11-15T00:00:00Z", 34, 3).await;
    usage(&table, "hourly", "2026-11-15T09:00:00Z", 20, 1).await;
    // The 16th: nothing from 00:00 on, so the item holds only the day.
    usage(&table, "daily", "2026-11-16T00:00:00Z", 11, 2).await;
    usage(&table, "hourly", "2026-11-16T10:00:00Z", 11, 2).await;
    table
}

async fn migrate(table: &SimTable, migration: &Migration) -> Result<Counts, MigrateError> {
    migration.migrate(table, &Scanning(table.clone()), &mut |_| {}).await
}

fn item(table: &SimTable, pk: &str, sk: &str) -> Option<Item> {
    table.item(&ItemKey::new(format!("{NS}/{pk}"), sk))
}

#[tokio::test]
async fn a_table_of_the_python_client_is_migrated() {
    let table = given().await;
    let before = table.items();
    let mut progress = Vec::new();
    let scan = Scanning(table.clone());
    let migration = Migration::new(NOW);
    let counts = migration.migrate(&table, &scan, &mut |so_far| progress.push(so_far.seen)).await;
    let counts = counts.unwrap();
    assert_eq!((counts.usage, counts.inexact, counts.expired, counts.unknown), (2, 0, 1, 0));
    assert!(progress.len() > 3 && progress.is_sorted(), "{progress:?}");
    // All attributes are unchanged, except those of shared usage items. Only entries are new.
    for old in before.iter().filter(|old| !key_of(old).sk.ends_with("T00:00:00Z")) {
        let new = table.item(&key_of(old)).unwrap();
        for (name, value) in old.iter().filter(|(name, _)| !is_of_version(name)) {
            assert_eq!(new.get(name), Some(value), "{} {name}", key_of(old));
        }
    }
    let meta = item(&table, "ENTITY#key-1", "#META").unwrap();
    assert_eq!(meta["GSI1PK"], text(&format!("{NS}/PARENT#org")));
    assert_eq!(meta["GSI1SK"], text("CHILD#key-1"));
    assert_eq!(meta["GSI4PK"], text(NS));
    let config = item(&table, "ENTITY#key-1", "#CONFIG#gpt-4").unwrap();
    assert_eq!(config["GSI3PK"], text(&format!("{NS}/ENTITY_CONFIG#gpt-4")));
    let bucket = item(&table, "BUCKET#key-1#gpt-4#0", "#STATE").unwrap();
    assert_eq!(bucket["GSI2SK"], text("BUCKET#key-1#0"));
    assert_eq!(bucket["GSI4SK"], text("BUCKET#key-1#gpt-4#0"));
    assert!(!item(&table, "BUCKET#idle#gpt-4#0", "#STATE").unwrap().contains_key("GSI4PK"));
    let day = |label: &str| item(&table, "ENTITY#key-1", &format!("#USAGE#gpt-4#{label}")).unwrap();
    assert_eq!(
        (&day("2026-11-15")["tpm"], &day("2026-11-15")["total_events"]),
        (&number(27), &number(2))
    );
    assert_eq!(
        (&day("2026-11-16")["tpm"], &day("2026-11-16")["total_events"]),
        (&number(11), &number(2))
    );
    assert_eq!(day("2026-11-15")["window"], text("daily"));
    let hour = day("2026-11-15T00:00:00Z");
    assert_eq!((&hour["tpm"], &hour["total_events"]), (&number(7), &number(1)));
    assert_eq!(total(&table.items()), total(&before));
    assert!(item(&table, "ENTITY#key-1", "#USAGE#gpt-4#2026-11-16T00:00:00Z").is_none());
    let version = read_version(&table).await.unwrap().unwrap();
    assert_eq!((version.schema.as_str(), version.client_min.as_str()), ("0.10.0", "0.9.0"));
}

/// The sum of all usage records.
fn total(items: &[Item]) -> i64 {
    let usage = items.iter().filter(|item| key_of(item).sk.starts_with("#USAGE#"));
    let amount = |item: &Item| match &item["tpm"] {
        Value::N(number) => number.parse::<i64>().unwrap(),
        other => panic!("{other:?}"),
    };
    usage.map(amount).sum()
}

fn is_of_version(name: &str) -> bool {
    ["schema_version", "updated_at", "updated_by", "lambda_version"].contains(&name)
}

#[tokio::test]
async fn a_second_run_finds_nothing_to_do() {
    let table = given().await;
    migrate(&table, &Migration::new(NOW)).await.unwrap();
    let before = table.items();
    let counts = migrate(&table, &Migration::new(NOW)).await.unwrap();
    assert!(counts.is_clean(), "{counts:?}");
    assert_eq!(table.items(), before);
}

#[tokio::test]
async fn a_dry_run_counts_the_same_and_changes_nothing() {
    let table = given().await;
    let before = table.items();
    let dry = migrate(&table, &Migration::new(NOW).run(Run::Dry)).await.unwrap();
    assert_eq!(table.items(), before);
    let real = migrate(&table, &Migration::new(NOW)).await.unwrap();
    // The scan of the real run also reads records that it has just written.
    assert_eq!((dry.indexed, dry.usage, dry.expired), (real.indexed, real.usage, real.expired));
}

#[tokio::test]
async fn one_namespace_can_be_migrated_first() {
    let table = given().await;
    let one = Migration::new(NOW).namespace(NamespaceId::new(OTHER).unwrap());
    let counts = migrate(&table, &one).await.unwrap();
    assert_eq!((counts.seen, counts.indexed, counts.usage), (1, 1, 0));
    assert_eq!(read_version(&table).await.unwrap().unwrap().schema, "0.9.0");
    assert!(!item(&table, "ENTITY#key-1", "#META").unwrap().contains_key("GSI4PK"));
}

#[tokio::test]
async fn a_migration_interrupted_at_any_write_can_be_repeated() {
    let whole = given().await;
    migrate(&whole, &Migration::new(NOW)).await.unwrap();
    let mut interrupted = 0;
    for writes in 0.. {
        let table = given().await;
        let failing = CutOff::after(writes, table.clone());
        let scan = Scanning(table.clone());
        let is_done = Migration::new(NOW).migrate(&failing, &scan, &mut |_| {}).await.is_ok();
        interrupted += u32::from(!is_done);
        // The check that `upgrade` makes.
        let is_needed = is_needed(read_version(&table).await.unwrap().as_ref());
        assert_eq!(is_needed, !is_done, "after {writes} writes");
        if is_needed {
            migrate(&table, &Migration::new(NOW)).await.unwrap();
        }
        assert_eq!(table.items(), whole.items(), "after {writes} writes");
        if is_done {
            break;
        }
    }
    assert!(interrupted > 8, "{interrupted}");
}

#[tokio::test]
async fn a_month_is_split_from_its_first_day_and_hour() {
    let table = SimTable::default();
    // The 1st: 4 from 00:00 on, 6 later; the 2nd: 1 and 2. All three windows are booked.
    let (day_1, day_2) = (10, 3);
    usage(&table, "hourly", "2026-11-01T00:00:00Z", 4 + day_1 + day_1 + day_2, 4).await;
    usage(&table, "hourly", "2026-11-01T05:00:00Z", 6, 1).await;
    usage(&table, "hourly", "2026-11-02T00:00:00Z", 1 + day_2, 3).await;
    usage(&table, "hourly", "2026-11-02T05:00:00Z", 2, 1).await;
    let all = Migration::new(NOW).windows(Window::ALL);
    let counts = migrate(&table, &all).await.unwrap();
    assert_eq!(counts.usage, 3);
    let of = |label: &str| item(&table, "ENTITY#key-1", &format!("#USAGE#gpt-4#{label}")).unwrap();
    assert_eq!(of("2026-11")["tpm"], number(13));
    assert_eq!(of("2026-11-01")["tpm"], number(10));
    assert_eq!(of("2026-11-02")["tpm"], number(3));
    assert_eq!(of("2026-11")["window"], text("monthly"));
    assert_eq!(of("2026-11-01T00:00:00Z")["tpm"], number(4));
    assert_eq!(of("2026-11-02T00:00:00Z")["tpm"], number(1));
    // A second run splits nothing again.
    assert!(migrate(&table, &all).await.unwrap().is_clean());
}

#[tokio::test]
async fn usage_of_this_programs_aggregator_is_not_changed() {
    let table = SimTable::default();
    usage(&table, "hourly", "2026-11-15T00:00:00Z", 7, 1).await;
    let pk = format!("{NS}/ENTITY#key-1");
    put(&table, &pk, "#USAGE#gpt-4#2026-11-15T00:00:00Z", &[("seq#0", text("1"))]).await;
    let counts = migrate(&table, &Migration::new(NOW)).await.unwrap();
    assert_eq!(counts.usage, 0);
}

#[tokio::test]
async fn keys_without_a_namespace_are_rejected_without_naming_an_entity() {
    let table = SimTable::default();
    put(&table, "ENTITY#key-1", "#META", &[("entity_id", text("key-1"))]).await;
    put(&table, &format!("{NS}/ENTITY#key-2"), "#META", &[("entity_id", text("key-2"))]).await;
    let before = table.items();
    let error = migrate(&table, &Migration::new(NOW)).await.unwrap_err();
    assert!(matches!(&error, MigrateError::TooOld("ENTITY#")), "{error:?}");
    assert!(!format!("{error} {error:?}").contains("key-1"), "{error:?}");
    assert!(error.hint().contains("Python client first"));
    assert!(read_version(&table).await.unwrap().is_none());
    // Items that were migrated before the error stay.
    assert_eq!(table.items().len(), before.len());
}

#[tokio::test]
async fn a_table_of_a_later_release_is_rejected() {
    let table = SimTable::default();
    put(&table, "_/SYSTEM#", "#VERSION", &[("schema_version", text("0.11.0"))]).await;
    let error = migrate(&table, &Migration::new(NOW)).await.unwrap_err();
    assert!(matches!(error, MigrateError::TooNew(_)));
}

#[tokio::test]
async fn an_inexact_split_loses_nothing() {
    let table = SimTable::default();
    usage(&table, "hourly", "2026-11-15T00:00:00Z", 10, 1).await;
    usage(&table, "hourly", "2026-11-15T09:00:00Z", 3, 1).await;
    let before = total(&table.items());
    let counts = migrate(&table, &Migration::new(NOW)).await.unwrap();
    assert_eq!((counts.usage, counts.inexact), (1, 1));
    assert_eq!(total(&table.items()), before);
    let of = |label: &str| item(&table, "ENTITY#key-1", &format!("#USAGE#gpt-4#{label}")).unwrap();
    assert_eq!(
        (&of("2026-11-15")["tpm"], &of("2026-11-15T00:00:00Z")["tpm"]),
        (&number(6), &number(4))
    );
}
