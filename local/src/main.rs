//! A DynamoDB endpoint on this machine: no Docker, no Java, no account.
//!
//! Prints its address on a line of its own as soon as it answers, and goes on until it is told to
//! stop (Ctrl-C, SIGTERM, or the end of its standard input with `--until-eof`).

use std::io::Read as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use dynoxide::Database;

/// How often expired items are removed. DynamoDB itself takes up to days.
const SWEEP_EVERY: Duration = Duration::from_secs(60);

#[derive(Parser)]
#[command(about = "A DynamoDB endpoint on this machine", version)]
struct Args {
    /// The port to listen on; 0 takes any that is free
    #[arg(long, default_value_t = 0)]
    port: u16,
    /// The folder to keep the tables in; without it they are gone with the program
    #[arg(long)]
    folder: Option<PathBuf>,
    /// Keep expired items: for tests whose clock is not this machine's
    #[arg(long)]
    no_sweep: bool,
    /// End when standard input ends, as it does with the program that started this one
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
    // Loopback only: whoever reaches the endpoint can change everything in it.
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", args.port)).await;
    let listener =
        listener.map_err(|error| format!("port {} cannot be used: {error}", args.port))?;
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
        .map_err(|error| format!("{} cannot be made: {error}", folder.display()))?;
    let file = folder.join("dynamodb.db");
    let path = file.to_str().ok_or("the folder's name is not text")?;
    Database::new(path).map_err(|error| format!("{} cannot be opened: {error}", file.display()))
}

async fn sweep(database: Database) {
    loop {
        tokio::time::sleep(SWEEP_EVERY).await;
        let database = database.clone();
        match tokio::task::spawn_blocking(move || database.sweep_ttl()).await {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => eprintln!("warning: expired items were not removed: {error}"),
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
