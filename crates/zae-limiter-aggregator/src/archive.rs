//! The archive of expired audit events: lines of JSON in compressed files, one folder for each day.
//!
//! The name of a file is a function of the events in it. So a batch that is delivered again replaces its own files,
//! and files with different events never replace each other, however the stream cuts its batches.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io::Write as _;

use flate2::{Compression, GzBuilder};
use sha2::{Digest as _, Sha256};
use zae_limiter_core::{BoxFuture, Timestamp, Window};
use zae_limiter_schema::{Item, ItemKey, Value, records};

/// The most characters of an event's id in a file name.
const ID_MAX: usize = 32;
/// The bytes of the hash in a file name. By chance, two of 2^64 files would share a name.
const HASH_BYTES: usize = 16;

/// An expired audit event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuditLine {
    /// The day of the event, for example `2026-11-15`.
    pub day: String,
    /// The start of the event's id, without the characters that a file name cannot have. Events may share it.
    pub id: String,
    /// The key that the event had in the table, which no other event has.
    pub key: ItemKey,
    /// The event as one line of JSON.
    pub json: String,
}

impl AuditLine {
    /// The line of an event. An event without a valid time is filed under `expired_at`.
    pub(crate) fn new(
        key: &ItemKey,
        namespace: &str,
        id: &str,
        item: &Item,
        expired_at: Timestamp,
    ) -> Self {
        let day = item.get("timestamp").and_then(Value::as_str).and_then(|text| text.get(..10));
        let day = day.filter(|day| Window::Daily.start_of(day).is_some());
        let day = day.map_or_else(|| Window::Daily.label(expired_at), str::to_owned);
        let mut line = records::to_object(item);
        // Only the table needs these.
        line.retain(|name, _| !["PK", "SK", "ttl"].contains(&&**name) && !name.starts_with("GSI"));
        line.insert("namespace".to_owned(), namespace.into());
        let id = id.chars().filter(char::is_ascii_alphanumeric).take(ID_MAX).collect();
        Self { day, id, key: key.clone(), json: serde_json::Value::Object(line).to_string() }
    }
}

/// A file of the archive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArchiveFile {
    /// `audit/year=2026/month=11/day=15/….jsonl.gz`, with a hash of the events. Two files have the same name if and
    /// only if they have the same events.
    pub name: String,
    /// One event per line.
    pub lines: Vec<String>,
}

/// The events of a file: id, key and line. A set, so that an event that is twice in a batch is archived once.
type Events = BTreeSet<(String, ItemKey, String)>;

impl ArchiveFile {
    /// Sorts the events of a batch into files, one for each day.
    pub fn of(lines: impl IntoIterator<Item = AuditLine>) -> Vec<Self> {
        let mut days: BTreeMap<String, Events> = BTreeMap::new();
        for AuditLine { day, id, key, json } in lines {
            days.entry(day).or_default().insert((id, key, json));
        }
        let file = |(day, events): (String, Events)| {
            let first = events.first().map_or("", |(id, ..)| id);
            let (year, month, day) = (&day[..4], &day[5..7], &day[8..]);
            let hash = hash_of(&events);
            let name = format!("audit/year={year}/month={month}/day={day}/{first}-{hash}.jsonl.gz");
            Self { name, lines: events.into_iter().map(|(_, _, json)| json).collect() }
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

/// The hash of a file's events. The length goes before each text, so no two sets of texts are hashed alike.
fn hash_of(events: &Events) -> String {
    let mut hash = Sha256::new();
    for (_, key, json) in events {
        for text in [&key.pk, &key.sk, json] {
            hash.update((text.len() as u64).to_be_bytes());
            hash.update(text);
        }
    }
    hash.finalize().iter().take(HASH_BYTES).map(|byte| format!("{byte:02x}")).collect()
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

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use proptest::prelude::*;

    use super::*;

    fn line(id: &str, timestamp: &str) -> AuditLine {
        let key = ItemKey::new("abcdefghijk/AUDIT#key-1", format!("#AUDIT#{id}"));
        let item = Item::from([
            ("PK".to_owned(), Value::text(&key.pk)),
            ("SK".to_owned(), Value::text(&key.sk)),
            ("GSI4PK".to_owned(), Value::text("abcdefghijk")),
            ("timestamp".to_owned(), Value::text(timestamp)),
            ("action".to_owned(), Value::text("of_a_later_release")),
            ("ttl".to_owned(), Value::number(1_794_700_000)),
            ("details".to_owned(), Value::M(Item::from([("n".to_owned(), Value::number(5))]))),
        ]);
        AuditLine::new(&key, "abcdefghijk", id, &item, Timestamp::from_millis(1_794_751_200_000))
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
        let names = files.iter().map(|file| file.name.rsplit_once('-').expect("a hash"));
        let names: Vec<(&str, usize)> = names.map(|(name, hash)| (name, hash.len())).collect();
        let length = 2 * HASH_BYTES + ".jsonl.gz".len();
        assert_eq!(
            names,
            [
                ("audit/year=2026/month=08/day=15/01A", length),
                ("audit/year=2026/month=08/day=16/01C", length),
                ("audit/year=2026/month=11/day=15/01D", length),
            ]
        );
        assert_eq!(files[0].lines.len(), 2);
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

    /// Events whose ids look alike in a file name, of two entities, with equal and different content.
    fn an_event() -> impl Strategy<Value = AuditLine> {
        let id = prop_oneof![
            "[ABCD]".boxed(),
            "01[AB]{0,1}[./-]{0,2}[AB]{0,1}".boxed(),
            "A{31,34}[BC]".boxed(),
        ];
        (id, 0..2_u8, 0..2_u8, 15..17_u8).prop_map(|(id, entity, details, day)| {
            let mut event = line(&id, &format!("2026-08-{day}T00:00:00Z"));
            event.key.pk = format!("abcdefghijk/AUDIT#{entity}");
            event.json = format!("{{\"details\":{details}}}");
            event
        })
    }

    /// What identifies an event.
    fn identity(event: &AuditLine) -> (String, ItemKey, String) {
        (event.day.clone(), event.key.clone(), event.json.clone())
    }

    proptest! {
        #[test]
        fn files_have_the_same_name_if_and_only_if_they_have_the_same_events(
            one in proptest::collection::vec(an_event(), 1..5),
            other in proptest::collection::vec(an_event(), 1..5),
        ) {
            let events = |all: &[AuditLine], file: &ArchiveFile| -> BTreeSet<_> {
                let day = format!("day={}/", &all[0].day[8..]);
                assert!(file.name.contains(&day));
                all.iter().map(identity).collect()
            };
            let of_a_day = |mut all: Vec<AuditLine>| {
                all.iter_mut().for_each(|event| event.day = "2026-08-15".to_owned());
                all
            };
            let (one, other) = (of_a_day(one), of_a_day(other));
            let files = [ArchiveFile::of(one.clone()), ArchiveFile::of(other.clone())];
            let same = events(&one, &files[0][0]) == events(&other, &files[1][0]);
            prop_assert_eq!(files[0][0].name == files[1][0].name, same);
            prop_assert_eq!(files[0][0].bytes() == files[1][0].bytes() || !same, true);
        }

        #[test]
        fn however_a_stream_is_cut_into_batches_every_event_stays_in_the_archive(
            events in proptest::collection::vec(an_event(), 1..12),
            batches in proptest::collection::vec((0..12_usize, 1..12_usize), 0..6),
        ) {
            // All once, then any pieces again.
            let whole = [(0, events.len())];
            let mut archive: BTreeMap<String, Vec<String>> = BTreeMap::new();
            for (from, count) in whole.into_iter().chain(batches.clone()).chain(batches) {
                let batch = events.iter().skip(from).take(count).cloned();
                for file in ArchiveFile::of(batch) {
                    let kept = archive.insert(file.name, file.lines.clone());
                    prop_assert!(kept.is_none_or(|kept| kept == file.lines));
                }
            }
            let lines: Vec<&String> = archive.values().flatten().collect();
            for event in &events {
                let same = |other: &&AuditLine| other.json == event.json;
                let wanted: BTreeSet<_> = events.iter().filter(same).map(identity).collect();
                let found = lines.iter().filter(|line| ***line == event.json).count();
                prop_assert!(found >= wanted.len(), "{found} of {}", wanted.len());
            }
        }
    }
}
