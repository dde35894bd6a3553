//! Follows the change stream of a limiter's table: writes usage records, refills and splits
//! buckets, and archives audit events.
//!
//! A batch goes through three steps. `event` parses its records, `change` says what each of them
//! means, and `effects` derives the writes from all of them. These steps are pure functions of the
//! batch, the settings and the time. [`Aggregator`] then carries out the writes.
//!
//! The stream may deliver a batch again, whole or in part, also after a crash halfway through it.
//! [`booking`](zae_limiter_schema::records::booking) explains why nothing is counted twice.
//!
//! Two kinds of shards appear here. A *shard* is one item that holds a share of a bucket. A *stream shard* is a shard
//! of the change stream.

mod archive;
mod archive_folder;
#[cfg(feature = "aws")]
mod archive_s3;
mod booking;
mod change;
pub mod daemon;
mod effects;
mod event;
mod execute;
mod heat;
#[cfg(feature = "aws")]
pub mod lambda;
mod refill;
mod settings;
mod split;
mod table_clock;

pub use archive::{Archive, ArchiveError, ArchiveFile, AuditLine};
pub use archive_folder::Folder;
#[cfg(feature = "aws")]
pub use archive_s3::Bucket;
pub use change::{BucketChange, Change, change_of};
pub use effects::{Announcement, Effects, PendingSplit, UsageEffect, effects_of};
pub use event::{EventKind, StreamRecord, Unreadable, read_event, read_record};
pub use execute::{Aggregator, NeverSplit, Report, Split};
pub use settings::{Settings, flag};
pub use split::Splitter;
