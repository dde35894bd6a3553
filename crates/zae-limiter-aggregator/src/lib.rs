//! What follows from the changes of a limiter's table: usage records, refills, split buckets, and
//! the archive of audit events.
//!
//! A batch of the table's stream is read (`event`), each record for what it means (`change`), and all
//! of them together for what is to be done (`effects`). So far everything is a function of the batch,
//! the settings and the moment. [`Aggregator`] does it.
//!
//! A batch may come again, whole or in shards, in the middle of which somebody has crashed: see
//! [`booking`](zae_limiter_schema::records::booking) for why nothing is counted twice.

mod archive;
#[cfg(feature = "aws")]
mod archive_s3;
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

pub use archive::{Archive, ArchiveError, ArchiveFile, AuditLine, Folder};
#[cfg(feature = "aws")]
pub use archive_s3::Bucket;
pub use change::{BucketChange, Change, change_of};
pub use effects::{Effects, PendingSplit, ShardCount, UsageEffect, effects_of};
pub use event::{EventKind, StreamRecord, Unreadable, read_event, read_record};
pub use execute::{Aggregator, LeaveWhole, Report, Split};
pub use settings::{Settings, flag};
pub use split::Splitter;
