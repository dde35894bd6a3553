//! Reads and writes the table's version record.

use zae_limiter_core::Timestamp;
use zae_limiter_schema::records::Version;
use zae_limiter_schema::{Condition, Consistency, ItemKey, Table, TableError, TableErrorKind};

/// The table's version record, if it has one.
///
/// # Errors
///
/// An error of the table. [`TableErrorKind::Incompatible`] if the record does not decode.
pub async fn read_version(table: &dyn Table) -> Result<Option<Version>, TableError> {
    let read = table.read(&[ItemKey::version()], Consistency::Strong).await?;
    let Some(item) = read.items.into_iter().next() else { return Ok(None) };
    Version::decode(&item).map(Some).map_err(|malformed| {
        let message = format!("the table's version record does not decode: {malformed}");
        TableError::new(TableErrorKind::Incompatible, message)
    })
}

/// Writes the version record if there is none. An existing record stays: only a migration changes
/// the version of a table.
///
/// # Errors
///
/// An error of the table.
pub async fn ensure_version(table: &dyn Table, now: Timestamp) -> Result<Version, TableError> {
    if let Some(version) = read_version(table).await? {
        return Ok(version);
    }
    let version = Version {
        schema: Version::SCHEMA.to_owned(),
        aggregator: None,
        client_min: "0.0.0".to_owned(),
        updated_at: Some(now),
        updated_by: Some(format!("zae-limiter {}", crate::versions::PROGRAM)),
    };
    let mut update = version.update();
    // Another client may have created it first; either record is fine.
    update.conditions.push(Condition::Absent("PK".to_owned()));
    table.update(&update).await?;
    Ok(read_version(table).await?.unwrap_or(version))
}
