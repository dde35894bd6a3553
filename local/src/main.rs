//! A DynamoDB endpoint on this machine: no Docker, no Java, no account.
//!
//! Prints its address on one line as soon as it accepts connections. Runs until Ctrl-C, SIGTERM or,
//! with `--until-eof`, the end of its stdin.

use std::io::Read as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use dynoxide::Database;

/// The interval at which expired items are removed. DynamoDB itself takes up to days.
const SWEEP_EVERY: Duration = Duration::from_secs(60);

#[derive(Parser)]
#[command(about = "A DynamoDB endpoint on this machine", version)]
struct Args {
    /// Port to listen on; 0 means any free port
    #[arg(long, default_value_t = 0)]
    port: u16,
    /// Folder for the tables [default: in memory, lost when the program ends]
    #[arg(long)]
    folder: Option<PathBuf>,
    /// Do not remove expired items, for tests with a clock of their own
    #[arg(long)]
    no_sweep: bool,
    /// Exit when stdin closes, which happens when the parent process ends
    #[arg(long)]
    until_eof: bool,
}

#[tokio::main]
async fn main() -> ExitCode {
    match run(Args::parse()).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run(args: Args) -> Result<(), String> {
    let database = open(args.folder)?;
    // Loopback only: the endpoint checks no credentials.
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", args.port)).await;
    let listener =
        listener.map_err(|error| format!("could not listen on port {}: {error}", args.port))?;
    let address = listener.local_addr().map_err(|error| error.to_string())?;
    println!("http://{address}");
    if !args.no_sweep {
        tokio::spawn(sweep(database.clone()));
    }
    dynoxide::server::serve_with_shutdown(listener, database, stopped(args.until_eof)).await
}

fn open(folder: Option<PathBuf>) -> Result<Database, String> {
    let Some(folder) = folder else {
        return Database::memory().map_err(|error| error.to_string());
    };
    std::fs::create_dir_all(&folder)
        .map_err(|error| format!("could not create {}: {error}", folder.display()))?;
    let file = folder.join("dynamodb.db");
    let path = file.to_str().ok_or("the folder's name is not valid UTF-8")?;
    Database::new(path).map_err(|error| format!("could not open {}: {error}", file.display()))
}

async fn sweep(database: Database) {
    loop {
        tokio::time::sleep(SWEEP_EVERY).await;
        let database = database.clone();
        match tokio::task::spawn_blocking(move || database.sweep_ttl()).await {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => eprintln!("warning: could not remove expired items: {error}"),
            Err(_) => return,
        }
    }
}

async fn stopped(until_eof: bool) {
    let eof = async {
        if !until_eof {
            std::future::pending::<()>().await;
        }
        let read = || drop(std::io::stdin().read_to_end(&mut Vec::new()));
        let _ = tokio::task::spawn_blocking(read).await;
    };
    tokio::select! {
        () = signalled() => {}
        () = eof => {}
    }
}

#[cfg(unix)]
async fn signalled() {
    use tokio::signal::unix::{SignalKind, signal};
    let Ok(mut terminate) = signal(SignalKind::terminate()) else { return };
    tokio::select! {
        _ = tokio::signal::ctrl_c() => {}
        _ = terminate.recv() => {}
    }
}

#[cfg(not(unix))]
async fn signalled() {
    let _ = tokio::signal::ctrl_c().await;
}
