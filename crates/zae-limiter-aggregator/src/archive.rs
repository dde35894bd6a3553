//! The archive of expired audit events: lines of JSON in compressed files, one folder for each day.

use std::collections::BTreeMap;
use std::fmt;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use flate2::{Compression, GzBuilder};
use zae_limiter_core::{BoxFuture, Timestamp, Window};
use zae_limiter_schema::{Item, Value, records};

/// The most characters of an event's id in a file name.
const ID_MAX: usize = 32;

/// An expired audit event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuditLine {
    /// The day of the event, for example `2026-11-15`.
    pub day: String,
    /// The event's id, without the characters that a file name cannot have.
    pub id: String,
    /// The event as one line of JSON.
    pub json: String,
}

impl AuditLine {
    /// The line of an event. An event without a valid time is filed under `expired_at`.
    pub(crate) fn new(namespace: &str, id: &str, item: &Item, expired_at: Timestamp) -> Self {
        let day = item.get("timestamp").and_then(Value::as_str).and_then(|text| text.get(..10));
        let day = day.filter(|day| Window::Daily.start_of(day).is_some());
        let day = day.map_or_else(|| Window::Daily.label(expired_at), str::to_owned);
        let mut line = records::to_object(item);
        // Only the table needs these.
        line.retain(|name, _| !["PK", "SK", "ttl"].contains(&&**name) && !name.starts_with("GSI"));
        line.insert("namespace".to_owned(), namespace.into());
        let id = id.chars().filter(char::is_ascii_alphanumeric).take(ID_MAX).collect();
        Self { day, id, json: serde_json::Value::Object(line).to_string() }
    }
}

/// A file of the archive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArchiveFile {
    /// `audit/year=2026/month=11/day=15/….jsonl.gz`. A redelivered batch gets the same names.
    pub name: String,
    /// One event per line.
    pub lines: Vec<String>,
}

impl ArchiveFile {
    /// Sorts the events of a batch into files, one for each day.
    pub fn of(lines: impl IntoIterator<Item = AuditLine>) -> Vec<Self> {
        let mut days: BTreeMap<String, BTreeMap<(String, String), ()>> = BTreeMap::new();
        for line in lines {
            // A map, so that an event that is twice in a batch is archived once.
            days.entry(line.day).or_default().insert((line.id, line.json), ());
        }
        let file = |(day, events): (String, BTreeMap<(String, String), ()>)| {
            let ids = || events.keys().map(|(id, _)| id.as_str());
            let (first, last) = (ids().next().unwrap_or(""), ids().next_back().unwrap_or(""));
            let (year, month, day) = (&day[..4], &day[5..7], &day[8..]);
            let count = events.len();
            let name = format!(
                "audit/year={year}/month={month}/day={day}/{first}-{last}-{count}.jsonl.gz"
            );
            Self { name, lines: events.into_keys().map(|(_, json)| json).collect() }
        };
        days.into_iter().map(file).collect()
    }

    /// The compressed content. The same lines give the same bytes.
    #[expect(clippy::missing_panics_doc, reason = "writing to a vector cannot fail")]
    pub fn bytes(&self) -> Vec<u8> {
        let mut writer = GzBuilder::new().mtime(0).write(Vec::new(), Compression::default());
        for line in &self.lines {
            writeln!(writer, "{line}").expect("writing to a vector cannot fail");
        }
        writer.finish().expect("writing to a vector cannot fail")
    }
}

/// Why a file could not be archived.
#[derive(Debug)]
pub struct ArchiveError {
    /// What failed, as one sentence.
    pub message: String,
    /// The underlying error.
    pub source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

impl fmt::Display for ArchiveError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for ArchiveError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_deref().map(|source| source as &(dyn std::error::Error + 'static))
    }
}

/// Stores archive files.
pub trait Archive: fmt::Debug + Send + Sync + 'static {
    /// Stores a file. It replaces a file of the same name.
    fn put<'a>(&'a self, name: &'a str, bytes: Vec<u8>) -> BoxFuture<'a, Result<(), ArchiveError>>;
}

/// An archive in a folder.
#[derive(Clone, Debug)]
pub struct Folder(PathBuf);

impl Folder {
    /// An archive in that folder. The folder is created with the first file.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self(path.into())
    }
}

/// Writes to a temporary file, which gets its name once it is complete.
fn write_whole(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    let unfinished = path.with_extension("part");
    let mut file = std::fs::File::create(&unfinished)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    std::fs::rename(&unfinished, path)
}

impl Archive for Folder {
    fn put<'a>(&'a self, name: &'a str, bytes: Vec<u8>) -> BoxFuture<'a, Result<(), ArchiveError>> {
        Box::pin(async move {
            let path = self.0.join(name);
            write_whole(&path, &bytes).map_err(|error| ArchiveError {
                message: format!("could not write {}", path.display()),
                source: Some(error.into()),
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use super::*;

    fn line(id: &str, timestamp: &str) -> AuditLine {
        let item = Item::from([
            ("PK".to_owned(), Value::text("abcdefghijk/AUDIT#key-1")),
            ("SK".to_owned(), Value::text(format!("#AUDIT#{id}"))),
            ("GSI4PK".to_owned(), Value::text("abcdefghijk")),
            ("timestamp".to_owned(), Value::text(timestamp)),
            ("action".to_owned(), Value::text("of_a_later_release")),
            ("ttl".to_owned(), Value::number(1_794_700_000)),
            ("details".to_owned(), Value::M(Item::from([("n".to_owned(), Value::number(5))]))),
        ]);
        AuditLine::new("abcdefghijk", id, &item, Timestamp::from_millis(1_794_751_200_000))
    }

    #[test]
    fn events_are_filed_under_the_day_on_which_they_happened() {
        let lines = [
            line("01B", "2026-08-15T23:59:59Z"),
            line("01A", "2026-08-15T00:00:00Z"),
            line("01C", "2026-08-16T00:00:00Z"),
            line("01A", "2026-08-15T00:00:00Z"),
            // Without a valid time: filed under the day on which it expired.
            line("../01D", "yesterday"),
        ];
        let files = ArchiveFile::of(lines);
        let names: Vec<&str> = files.iter().map(|file| file.name.as_str()).collect();
        assert_eq!(
            names,
            [
                "audit/year=2026/month=08/day=15/01A-01B-2.jsonl.gz",
                "audit/year=2026/month=08/day=16/01C-01C-1.jsonl.gz",
                "audit/year=2026/month=11/day=15/01D-01D-1.jsonl.gz",
            ]
        );
        assert_eq!(
            files[1].lines,
            [concat!(
                r#"{"action":"of_a_later_release","details":{"n":5},"#,
                r#""namespace":"abcdefghijk","timestamp":"2026-08-16T00:00:00Z"}"#
            )]
        );
    }

    #[test]
    fn a_file_decompresses_to_its_lines() {
        let file = &ArchiveFile::of([line("01A", "2026-08-15"), line("01B", "2026-08-15")])[0];
        let mut text = String::new();
        flate2::read::GzDecoder::new(&*file.bytes()).read_to_string(&mut text).expect("gzip");
        assert_eq!(text.lines().collect::<Vec<_>>(), file.lines);
        assert_eq!(file.bytes(), file.bytes());
    }
}
