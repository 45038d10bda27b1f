import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.NoSuchFileException;
import java.nio.file.Path;
import org.apache.hadoop.conf.Configuration;
import org.apache.spark.sql.execution.streaming.checkpointing.CheckpointFileManager;
import org.apache.spark.sql.execution.streaming.checkpointing.FileContextBasedCheckpointFileManager;

/**
 * A checkpoint whose logs have points (gates.py): `offsets.N` before Spark logs the offsets of micro-batch N,
 * `commits.N` before it logs that the batch is done; `offsets-logged.N` and `commits-logged.N` after that.
 */
public class GatedCheckpoints extends FileContextBasedCheckpointFileManager {
  private static final long WAIT_MILLIS = 300_000;
  private static final long POLL_MILLIS = 20;

  public GatedCheckpoints(org.apache.hadoop.fs.Path path, Configuration configuration) {
    super(path, configuration);
  }

  @Override
  public CheckpointFileManager.CancellableFSDataOutputStream createAtomic(
      org.apache.hadoop.fs.Path path, boolean overwrite) {
    String log = path.getParent().getName();
    if (!log.equals("offsets") && !log.equals("commits")) {
      return super.createAtomic(path, overwrite);
    }
    pass(log + "." + path.getName());
    CheckpointFileManager.CancellableFSDataOutputStream stream = super.createAtomic(path, overwrite);
    return new CheckpointFileManager.CancellableFSDataOutputStream(stream) {
      @Override
      public void cancel() {
        stream.cancel();
      }

      @Override
      public void close() throws IOException {
        stream.close();
        pass(log + "-logged." + path.getName());
      }
    };
  }

  private static void pass(String name) {
    try {
      take(name);
    } catch (IOException | InterruptedException error) {
      throw new RuntimeException(error);
    }
  }

  private static void take(String name) throws IOException, InterruptedException {
    Path gates = Path.of(System.getenv("FENCEPOST_FAULTS"));
    Path taken = gates.resolve(name + ".taken");
    try {
      Files.move(gates.resolve(name + ".armed"), taken);
    } catch (NoSuchFileException nothing) {
      return;
    }
    String action = Files.readString(taken);
    Path part = gates.resolve(name + ".part");
    Files.writeString(part, Long.toString(ProcessHandle.current().pid()));
    Files.move(part, gates.resolve(name + ".at"));
    if (action.equals("raise")) {
      throw new IOException("at " + name);
    }
    long deadline = System.currentTimeMillis() + WAIT_MILLIS;
    while (!Files.exists(gates.resolve(name + ".open"))) {
      if (System.currentTimeMillis() > deadline) {
        throw new IOException("nobody opened " + name);
      }
      Thread.sleep(POLL_MILLIS);
    }
  }
}
