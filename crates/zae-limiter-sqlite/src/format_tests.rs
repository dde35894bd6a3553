//! `docs/sqlite-format.md` says what the code does.
//!
//! The page has generated blocks between `<!-- generated: NAME -->` and `<!-- end -->`.
//! `UPDATE_DOCS=1 cargo test -p zae-limiter-sqlite the_format_page` writes them again.

use std::fmt::Write as _;

use rusqlite::Connection;
use zae_limiter_core::bucket_state::BucketState;
use zae_limiter_core::{Cell, LimitName, LimitSet, Rate};

use super::*;

const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/sqlite-format.md");

const STALE: &str = "docs/sqlite-format.md differs from the code; run UPDATE_DOCS=1 cargo test -p \
                     zae-limiter-sqlite the_format_page to write the generated blocks again";

fn open(durability: Durability) -> (tempfile::TempDir, Connection) {
    let folder = tempfile::tempdir().unwrap();
    let conn = schema::open_writer(&folder.path().join("limits.db"), durability).unwrap();
    (folder, conn)
}

/// A setting as text, whatever its type.
fn pragma(conn: &Connection, name: &str) -> String {
    let value = conn.query_row(&format!("PRAGMA {name}"), [], |row| row.get(0)).unwrap();
    match value {
        rusqlite::types::Value::Text(text) => text,
        rusqlite::types::Value::Integer(number) => number.to_string(),
        other => panic!("{name} is {other:?}"),
    }
}

fn settings_table(rows: &[(&str, String, &str)]) -> String {
    let mut table = String::from("| setting | value | meaning |\n| --- | --- | --- |\n");
    for (name, value, meaning) in rows {
        writeln!(table, "| `{name}` | `{value}` | {meaning} |").unwrap();
    }
    table
}

fn file_block() -> String {
    let (_folder, conn) = open(Durability::Normal);
    let id: i32 = pragma(&conn, "application_id").parse().unwrap();
    settings_table(&[
        ("application_id", format!("{id:#010x}"), "`zael` in ASCII: a file of the limiter"),
        ("user_version", pragma(&conn, "user_version"), "the version of the tables"),
        (
            "page_size",
            pragma(&conn, "page_size"),
            "bytes; small, because most writes change one row",
        ),
        ("encoding", pragma(&conn, "encoding"), "of all texts"),
        (
            "journal_mode",
            pragma(&conn, "journal_mode"),
            "readers and the writer do not block each other",
        ),
        ("auto_vacuum", pragma(&conn, "auto_vacuum"), "off: the file does not shrink by itself"),
    ])
}

fn connection_block() -> String {
    let (_folder, normal) = open(Durability::Normal);
    let (folder, full) = open(Durability::Full);
    let reader = schema::open_reader(&folder.path().join("limits.db")).unwrap();
    let cache = |conn| pragma(conn, "cache_size");
    settings_table(&[
        ("synchronous", pragma(&normal, "synchronous"), "with `durability=normal`: `NORMAL`"),
        ("synchronous", pragma(&full, "synchronous"), "with `durability=full`: `FULL`"),
        ("fullfsync", pragma(&normal, "fullfsync"), "with `durability=normal`"),
        ("fullfsync", pragma(&full, "fullfsync"), "with `durability=full`; macOS only"),
        (
            "checkpoint_fullfsync",
            pragma(&normal, "checkpoint_fullfsync"),
            "in both modes; macOS only",
        ),
        (
            "journal_size_limit",
            pragma(&full, "journal_size_limit"),
            "bytes to which SQLite cuts a log that was longer",
        ),
        (
            "wal_autocheckpoint",
            pragma(&full, "wal_autocheckpoint"),
            "pages in the log before a checkpoint",
        ),
        ("cache_size", cache(&full), "of the writer; negative is in KiB"),
        ("cache_size", cache(&reader), "of the reader"),
    ])
}

fn tables_block() -> String {
    let (_folder, conn) = open(Durability::Normal);
    let sql = "SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL ORDER BY rowid";
    let mut statement = conn.prepare(sql).unwrap();
    let statements: Result<Vec<String>, _> =
        statement.query_map([], |row| row.get(0)).unwrap().collect();
    format!("```sql\n{};\n```\n", statements.unwrap().join(";\n"))
}

fn example_state() -> BucketState {
    let limit = |name, capacity, refill, period_ms| {
        let rate = Rate::new(Millitokens::new(capacity), Millitokens::new(refill), period_ms);
        (LimitName::new(name).unwrap(), rate.unwrap())
    };
    let limits =
        [limit("rpm", 20_000, 10_000, 60_000), limit("tpm", 90_000_000, 90_000_000, 60_000)];
    let cell = |tokens, remainder, consumed, unbooked| Cell {
        tokens: Millitokens::new(tokens),
        remainder,
        consumed: Millitokens::new(consumed),
        unbooked: Millitokens::new(unbooked),
    };
    let cells = [cell(17_166, 40_000, 3_000, 3_000), cell(-250_000, 0, 90_250_000, -1_000)];
    let refilled_at = Timestamp::from_millis(1_794_752_736_789);
    let bucket =
        Bucket::from_parts(Arc::new(LimitSet::from_rates(limits).unwrap()), cells, refilled_at);
    BucketState { bucket, expires_at: None, hour: 498_542, events: 3, rewound_at: None }
}

/// Splits an encoding into fields, by the rules of the page and without the code of the store.
struct Fields<'a> {
    bytes: &'a [u8],
    at: usize,
    table: String,
}

impl Fields<'_> {
    fn row(&mut self, length: usize, field: &str, value: impl std::fmt::Display) {
        let bytes = &self.bytes[self.at..self.at + length];
        let hex: Vec<_> = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        writeln!(self.table, "| {} | `{}` | {field} | {value} |", self.at, hex.join(" ")).unwrap();
        self.at += length;
    }

    fn byte(&mut self, field: &str, expected: u8) {
        assert_eq!(self.bytes[self.at], expected, "{field}");
        self.row(1, field, expected);
    }

    fn unsigned(&self) -> (usize, u128) {
        let rest = &self.bytes[self.at..];
        let length = rest.iter().position(|byte| *byte < 128).unwrap() + 1;
        let digits = rest[..length].iter().rev();
        (length, digits.fold(0, |number, byte| number * 128 + u128::from(byte % 128)))
    }

    fn number(&mut self, field: &str, expected: u64) {
        let (length, number) = self.unsigned();
        assert_eq!(number, u128::from(expected), "{field}");
        self.row(length, field, number);
    }

    fn signed(&mut self, field: &str, expected: i64) {
        let (length, mapped) = self.unsigned();
        let half = i128::try_from(mapped / 2).unwrap();
        let number = if mapped % 2 == 0 { half } else { -half - 1 };
        assert_eq!(number, i128::from(expected), "{field}");
        self.row(length, field, number);
    }

    fn name(&mut self, field: &str, expected: &str) {
        let length = usize::from(self.bytes[self.at]);
        assert_eq!(&self.bytes[self.at + 1..self.at + 1 + length], expected.as_bytes());
        self.row(1 + length, field, format_args!("`{expected}`"));
    }
}

fn example_block() -> String {
    let state = example_state();
    let mut bytes = Vec::new();
    codec::encode_state(&state, &mut bytes);
    assert_eq!(codec::decode_state(&bytes, None, None).unwrap(), state);
    let table = String::from("| at | bytes | field | value |\n| --- | --- | --- | --- |\n");
    let mut fields = Fields { bytes: &bytes, at: 0, table };
    fields.byte("version", 1);
    fields.signed("refilled_at", state.bucket.refilled_at().as_millis());
    fields.signed("hour", state.hour);
    fields.number("events", state.events);
    fields.number("limits", state.bucket.cells().len() as u64);
    for ((name, rate), cell) in state.bucket.limits().iter().zip(state.bucket.cells()) {
        fields.name("name", name.as_str());
        fields.number("capacity", rate.capacity().get().cast_unsigned());
        fields.number("refill", rate.refill_amount().get().cast_unsigned());
        fields.number("period", rate.period_ms());
        fields.signed("tokens", cell.tokens.get());
        fields.number("remainder", cell.remainder);
        fields.signed("consumed", cell.consumed.get());
        fields.signed("unbooked", cell.unbooked.get());
    }
    assert_eq!(fields.at, bytes.len(), "the page explains every byte");
    fields.table
}

/// Replaces the content of a generated block.
fn with_block(page: &str, name: &str, content: &str) -> String {
    let start = format!("<!-- generated: {name} -->\n");
    let (before, rest) = page.split_once(&start).unwrap_or_else(|| panic!("no block {name}"));
    let (_, after) = rest.split_once("<!-- end -->").expect("a block ends");
    format!("{before}{start}\n{content}\n<!-- end -->{after}")
}

#[test]
fn the_format_page_has_the_tables_versions_and_bytes_of_the_code() {
    let page = std::fs::read_to_string(PAGE).unwrap();
    let blocks = [
        ("file", file_block()),
        ("connection", connection_block()),
        ("tables", tables_block()),
        ("example", example_block()),
    ];
    let current =
        blocks.iter().fold(page.clone(), |page, (name, content)| with_block(&page, name, content));
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(PAGE, current).unwrap();
    } else {
        assert!(page == current, "{STALE}");
    }
}

#[test]
fn the_format_page_names_the_version_and_the_bounds_of_the_sweeper() {
    let page = std::fs::read_to_string(PAGE).unwrap().replace('\n', " ");
    let (_folder, conn) = open(Durability::Normal);
    let version = pragma(&conn, "user_version");
    assert_eq!(sweep::BUCKET_DELAY_MS, 3_600_000, "the page says one hour");
    assert_eq!(sweep::RECORD_DELAY_MS, 86_400_000, "the page says one day");
    for text in [
        format!("version {version} | opens it"),
        format!("after every {} transactions", writer::SWEEP_EVERY),
        format!("at most {} rows", sweep::SWEEP_MAX),
        format!("at most {} limits", zae_limiter_core::LIMITS_MAX),
    ] {
        assert!(page.contains(&text), "docs/sqlite-format.md does not say: {text}");
    }
}

#[test]
fn the_format_page_explains_every_column() {
    let page = std::fs::read_to_string(PAGE).unwrap();
    let (_folder, conn) = open(Durability::Normal);
    let sql = "SELECT t.name, c.name FROM sqlite_schema t, pragma_table_info(t.name) c \
               WHERE t.type = 'table' ORDER BY t.rowid, c.cid";
    let mut statement = conn.prepare(sql).unwrap();
    let columns = statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?))).unwrap();
    let columns: Vec<(String, String)> = columns.collect::<Result<_, _>>().unwrap();
    assert!(columns.len() > 40, "{columns:?}");
    let mut documented = Vec::new();
    for section in page.split("\n### `").skip(1) {
        let (table, text) = section.split_once("`\n").unwrap();
        let text = text.split("\n## ").next().unwrap();
        let names = text.lines().filter_map(|line| line.strip_prefix("| `")?.split_once('`'));
        documented.extend(names.map(|(name, _)| (table.to_owned(), name.to_owned())));
    }
    assert_eq!(documented, columns);
}
