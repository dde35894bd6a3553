//! Expired audit events, kept as lines of JSON in compressed files, one folder for each day.

use std::collections::BTreeMap;
use std::fmt;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use flate2::{Compression, GzBuilder};
use zae_limiter_core::{BoxFuture, Timestamp, Window};
use zae_limiter_schema::{Item, Value, records};

/// The longest part of an event's id in a file's name.
const ID_MAX: usize = 32;

/// An expired audit event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuditLine {
    /// `2026-11-15`: the day on which it happened.
    pub day: String,
    /// Its id, as far as it can be part of a file's name.
    pub id: String,
    /// The line itself.
    pub json: String,
}

impl AuditLine {
    /// The line of an event. `expired_at` stands in for a time that the event does not tell.
    pub(crate) fn new(namespace: &str, id: &str, item: &Item, expired_at: Timestamp) -> Self {
        let told = item.get("timestamp").and_then(Value::as_str).and_then(|text| text.get(..10));
        let day = told.filter(|day| Window::Daily.start_of(day).is_some());
        let day = day.map_or_else(|| Window::Daily.label(expired_at), str::to_owned);
        let mut line = records::to_object(item);
        // What only the table needs.
        line.retain(|name, _| !["PK", "SK", "ttl"].contains(&&**name) && !name.starts_with("GSI"));
        line.insert("namespace".to_owned(), namespace.into());
        let id = id.chars().filter(char::is_ascii_alphanumeric).take(ID_MAX).collect();
        Self { day, id, json: serde_json::Value::Object(line).to_string() }
    }
}

/// A file of the archive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArchiveFile {
    /// `audit/year=2026/month=11/day=15/….jsonl.gz`. A batch that comes again has the same names.
    pub name: String,
    /// The events, each on a line of its own.
    pub lines: Vec<String>,
}

impl ArchiveFile {
    /// The files of a batch's events, one for each day.
    pub fn of(lines: impl IntoIterator<Item = AuditLine>) -> Vec<Self> {
        let mut days: BTreeMap<String, BTreeMap<(String, String), ()>> = BTreeMap::new();
        for line in lines {
            // A map: the same event twice in a batch is one event.
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

    /// What is in the file. The same lines give the same bytes.
    #[expect(clippy::missing_panics_doc, reason = "a vector takes everything")]
    pub fn bytes(&self) -> Vec<u8> {
        let mut writer = GzBuilder::new().mtime(0).write(Vec::new(), Compression::default());
        for line in &self.lines {
            writeln!(writer, "{line}").expect("a vector takes everything");
        }
        writer.finish().expect("a vector takes everything")
    }
}

/// A file that could not be kept.
#[derive(Debug)]
pub struct ArchiveError {
    /// One sentence.
    pub message: String,
    /// What lies behind it.
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

/// Where files are kept.
pub trait Archive: fmt::Debug + Send + Sync + 'static {
    /// Keeps a file; one of the same name is replaced.
    fn keep<'a>(&'a self, name: &'a str, bytes: Vec<u8>)
    -> BoxFuture<'a, Result<(), ArchiveError>>;
}

/// An archive in a folder.
#[derive(Clone, Debug)]
pub struct Folder(PathBuf);

impl Folder {
    /// The archive in that folder, which is made when it is first needed.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self(path.into())
    }
}

/// Under its own name only once it is whole.
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
    fn keep<'a>(
        &'a self,
        name: &'a str,
        bytes: Vec<u8>,
    ) -> BoxFuture<'a, Result<(), ArchiveError>> {
        Box::pin(async move {
            let path = self.0.join(name);
            write_whole(&path, &bytes).map_err(|error| ArchiveError {
                message: format!("{} could not be written", path.display()),
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
    fn events_go_to_the_day_on_which_they_happened() {
        let lines = [
            line("01B", "2026-08-15T23:59:59Z"),
            line("01A", "2026-08-15T00:00:00Z"),
            line("01C", "2026-08-16T00:00:00Z"),
            line("01A", "2026-08-15T00:00:00Z"),
            // Without a time of its own: the day on which it expired.
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
    fn a_file_is_read_as_it_was_written() {
        let file = &ArchiveFile::of([line("01A", "2026-08-15"), line("01B", "2026-08-15")])[0];
        let mut text = String::new();
        flate2::read::GzDecoder::new(&*file.bytes()).read_to_string(&mut text).expect("gzip");
        assert_eq!(text.lines().collect::<Vec<_>>(), file.lines);
        assert_eq!(file.bytes(), file.bytes());
    }
}
